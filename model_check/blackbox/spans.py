"""Wraps a function or method so that each call is a span in the ring, and exceptions that leave it are noted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from model_check.blackbox.box import BOX, SpanKind
from model_check.blackbox.exceptions import NOTES
from model_check.record.ring import RAISED

Original = Callable[..., Any]
Describe = Callable[[tuple[Any, ...], dict[str, Any]], str]


def spanned(
    original: Original, phase: str, *, op: str = "none", describe: Describe | None = None, adopt: bool = False
) -> Original:
    """The same function with a span around each call. `adopt`: a lone script that comes here is rank 0 of 1."""

    what = SpanKind(phase, op)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = BOX.recorder or (BOX.adopt() if adopt else None)
        if recorder is None:
            return original(*args, **kwargs)
        try:
            NOTES.moved_on()
            detail = describe(args, kwargs) if describe is not None else ""
            span = BOX.begin(recorder, what, detail)
        except Exception as error:
            BOX.give_up(error)
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except StopIteration:
            BOX.end(recorder, what, span, "exhausted")
            raise
        except BaseException as error:
            BOX.end(recorder, what, span, f"{RAISED}{type(error).__name__}")
            NOTES.left_a_call(error, phase)
            raise
        BOX.end(recorder, what, span)
        return result

    call._model_check_original = original  # type: ignore[attr-defined]
    return call


@contextmanager
def span(phase: str, detail: str = "") -> Iterator[None]:
    """A span by hand, for code that knows its own phases, as our trainer does."""
    recorder = BOX.recorder
    if recorder is None:
        yield
        return
    what = SpanKind(phase)
    begun = BOX.begin(recorder, what, detail)
    try:
        yield
    except BaseException as error:
        BOX.end(recorder, what, begun, f"{RAISED}{type(error).__name__}")
        raise
    BOX.end(recorder, what, begun)


def is_wrapped(function: Any) -> bool:
    return hasattr(function, "_model_check_original")
