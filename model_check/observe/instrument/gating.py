"""Takes a rank through the gate (observe.gate) around heavy imports and compilations, where its launcher set one up.

`GATE.gate` is None in every other process, and everything here then calls straight through.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from model_check.observe.gate import Gate, GatePlan
from model_check.observe.instrument.box import BOX, SpanKind

_AT_THE_GATE = SpanKind("gate")
_COMPILING = SpanKind("compile")


class _OfThisRank:
    """The gate of this process, once it is known to be a rank."""

    gate: Gate | None = None


GATE = _OfThisRank()


def open_for(rank: int) -> None:
    """Called when the process learns its rank; does nothing without a plan in the environment."""
    plan = GatePlan.from_environment(os.environ)
    if plan is not None and GATE.gate is None:
        GATE.gate = Gate(plan, rank)


def let_go() -> None:
    """Before anything that waits for other ranks."""
    gate = GATE.gate
    if gate is not None and gate.held:
        gate.release()


@contextmanager
def through_the_gate(what: str) -> Iterator[None]:
    """Holds a slot while the block runs; the wait for it is a span of phase `gate`."""
    gate = GATE.gate
    if gate is None:
        yield
        return
    recorder = BOX.recorder
    span = BOX.begin(recorder, _AT_THE_GATE, what) if recorder is not None else 0
    gate.enter()
    if recorder is not None:
        BOX.end(recorder, _AT_THE_GATE, span)
    try:
        yield
    finally:
        gate.leave()


def patch_inductor(module: ModuleType) -> None:
    """torch._inductor.compile_fx gets a span; at a gate the first rank fills the cache, the next ones load from it."""
    module.compile_fx = _gated(module.compile_fx)  # type: ignore[attr-defined]


def _gated(compile_fx: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_fx)
    def gated(*args: Any, **kwargs: Any) -> Any:
        recorder = BOX.recorder
        if recorder is None:
            return compile_fx(*args, **kwargs)
        with through_the_gate("torch.compile"):
            span = BOX.begin(recorder, _COMPILING, "torch.compile")
            try:
                return compile_fx(*args, **kwargs)
            finally:
                BOX.end(recorder, _COMPILING, span)

    return gated
