"""Passes a training step on to those who watch its numbers: the guard, the replicas, the trends.

Whatever goes wrong in a watcher of ours ends the watching, never the script; only a step that the guard refuses does.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from model_check.errors import NumericsError
from model_check.observe.instrument.box import BOX
from model_check.observe.instrument.guard import GUARD
from model_check.observe.instrument.inputs import Call
from model_check.observe.instrument.readings import reading_of
from model_check.observe.instrument.replicas import REPLICAS
from model_check.observe.instrument.scaling import SCALING
from model_check.observe.instrument.tokens import TOKENS
from model_check.observe.instrument.trends import TRENDS

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Watching:
    on = True


def _harmless(watch: Callable[_P, _R]) -> Callable[_P, _R | None]:
    @functools.wraps(watch)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        if not _Watching.on or BOX.recorder is None:
            return None
        try:
            return watch(*args, **kwargs)
        except NumericsError:
            raise
        except Exception as error:
            _Watching.on = False
            trace = traceback.format_exception(type(error), error, error.__traceback__)
            BOX.event("guard_failed", error=f"{type(error).__name__}: {error}", traceback="".join(trace)[-4000:])
            return None

    return call


@_harmless
def forward_begins(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The outermost module is called."""
    TOKENS.forward_begins(module, args, kwargs)
    REPLICAS.forward_begins(module, args, kwargs)
    return GUARD.forward_begins(module, args, kwargs)


@_harmless
def forward_ended(module: Any, call: Call | None, result: Any) -> None:
    if call is not None:
        GUARD.forward_ended(call, result)
    TRENDS.forward_ended(module, result)


@_harmless
def forward_failed() -> None:
    TOKENS.failed()


@_harmless
def backward_begins(root: Any) -> None:
    """`root` is what `backward` was called on, or the first of several."""
    scaled = SCALING.is_scaled(root)
    loss = reading_of(SCALING.unscaled(root) if scaled else root)
    GUARD.backward_begins(root, loss, scaled=scaled)
    TRENDS.backward_begins(loss)


@_harmless
def backward_ended() -> None:
    GUARD.backward_ended()


@_harmless
def exchange_in_pass(given: list[torch.Tensor], group: Any, *, in_backward: bool) -> None:
    """The dispatcher is about to hand a collective to its backend, in the middle of a forward or a backward."""
    GUARD.exchange_in_pass(given, group, in_backward=in_backward)


@_harmless
def exchange_after_backward() -> None:
    GUARD.exchange_after_backward()


@_harmless
def optimizer_begins(optimizer: Any) -> None:
    SCALING.optimizer_begins()
    if not SCALING.decides(optimizer):
        GUARD.optimizer_begins(optimizer)
    TRENDS.optimizer_begins(optimizer)


@_harmless
def step_done() -> None:
    GUARD.step_done()
    TRENDS.step_done()


@_harmless
def loss_scaled(loss: Any, scaled: Any) -> None:
    """GradScaler.scale was called."""
    SCALING.scale(loss, scaled)


@_harmless
def scaler_step_begins() -> None:
    SCALING.step_begins()


@_harmless
def scaler_step_ended(scaler: Any) -> None:
    SCALING.step_ended(scaler)


@_harmless
def process_fails() -> None:
    """An exception ends the process. A device's assertion shows only now, long after the forward that caused it."""
    TOKENS.failed()


@_harmless
def process_ends() -> None:
    """Nothing more will come: what was held back for later is written."""
    GUARD.flush()
    REPLICAS.flush()
    TRENDS.flush()


def forget_after_fork() -> None:
    GUARD.forget()
    TRENDS.forget()
