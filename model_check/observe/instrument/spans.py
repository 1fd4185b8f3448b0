"""Wraps a function or method so that each call is a span in the ring, and exceptions that leave it are noted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from model_check.observe.instrument.box import BOX
from model_check.observe.instrument.exceptions import NOTES

Original = Callable[..., Any]
Describe = Callable[[tuple[Any, ...], dict[str, Any]], str]


def spanned(
    original: Original, phase: str, *, op: str = "none", describe: Describe | None = None, adopt: bool = False
) -> Original:
    """The same function with a span around each call. `adopt`: a lone script that comes here is rank 0 of 1."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = BOX.recorder or (BOX.adopt() if adopt else None)
        if recorder is None:
            return original(*args, **kwargs)
        NOTES.moved_on()
        detail = describe(args, kwargs) if describe is not None else ""
        span = BOX.begin(recorder, phase, op=op, detail=detail)
        try:
            result = original(*args, **kwargs)
        except StopIteration:
            BOX.end(recorder, span, phase, op=op, detail="exhausted")
            raise
        except BaseException as error:
            BOX.end(recorder, span, phase, op=op, detail=f"raised {type(error).__name__}")
            NOTES.left_a_call(error, phase)
            raise
        BOX.end(recorder, span, phase, op=op)
        return result

    call._model_check_original = original  # type: ignore[attr-defined]
    return call


def is_wrapped(function: Any) -> bool:
    return hasattr(function, "_model_check_original")
