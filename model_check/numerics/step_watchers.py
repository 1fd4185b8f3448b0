"""Passes a training step on to those who watch its numbers: the guard, the replicas, the trends.

A thread that trains has watchers of its own: none of them looks at what another thread is about to change. Whatever
goes wrong in a watcher of ours ends the watching, never the script; only a step that the guard refuses does.
"""

from __future__ import annotations

import functools
import math
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch

from model_check.blackbox.box import BOX
from model_check.blackbox.device_numbers import reading_of
from model_check.blackbox.native_collectives import Exchange
from model_check.errors import NumericsError
from model_check.numerics.replaying import Call
from model_check.numerics.replicas import REPLICAS, ByHand
from model_check.numerics.script_guard import Guard
from model_check.numerics.token_ids import Tokens
from model_check.numerics.trends import Trends
from model_check.record.events.numerics import GuardFailed

_P = ParamSpec("_P")
_R = TypeVar("_R")
_SKIPS_IN_A_ROW = 10
_LEAST_SCALE = 1.0


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
            trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            BOX.event(GuardFailed(error=f"{type(error).__name__}: {error}", traceback=trace[-4000:]))
            return None

    return call


class Scaling:
    """A script's GradScaler: which losses are scaled, and how many steps it has left out in a row.

    A healthy one skips a step now and then, to learn how far it may scale; one that never stops is ill.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._scaled: weakref.ref[torch.Tensor] | None = None
        self._loss: weakref.ref[torch.Tensor] | None = None
        self._stepped = False
        self._skipped = 0
        self._last_good_scale = math.nan
        self._reported = False

    def scale(self, loss: Any, scaled: Any) -> None:
        if isinstance(loss, torch.Tensor) and isinstance(scaled, torch.Tensor):
            self._loss, self._scaled = weakref.ref(loss), weakref.ref(scaled)

    def is_scaled(self, root: Any) -> bool:
        return self._scaled is not None and self._scaled() is root

    @property
    def skipping(self) -> bool:
        return self._skipped > 0

    @property
    def in_use(self) -> bool:
        """Gradients that are not finite are its business: that is how it finds its factor."""
        return self._scaled is not None

    def unscaled(self, root: Any) -> Any:
        loss = self._loss() if self._loss is not None else None
        return loss if loss is not None else root

    def optimizer_begins(self) -> None:
        self._stepped = True

    def decides(self, optimizer: Any) -> bool:
        """The scaler judges this step's gradients itself, before or inside the optimizer."""
        return self.in_use or getattr(optimizer, "found_inf", None) is not None

    def step_begins(self) -> None:
        self._stepped = False

    def step_ended(self, scaler: Any) -> None:
        """After GradScaler.step: it called the optimizer, or left the step out."""
        if self._stepped:
            self._skipped = 0
            return
        self._skipped += 1
        scale = float(scaler.get_scale())
        if self._skipped == 1:
            self._last_good_scale = scale
        if not self._reported and (self._skipped >= _SKIPS_IN_A_ROW or scale < _LEAST_SCALE):
            self._reported = True
            self._guard.scaler_gave_up(skipped=self._skipped, scale=scale, first_scale=self._last_good_scale)
        self._guard.step_done()


class Steps:
    """Those who watch the steps of one thread."""

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self._done = 0
        self.guard = Guard()
        self._scaling = Scaling(self.guard)
        self._tokens = Tokens()
        self._by_hand = ByHand()

    @property
    def _trends(self) -> Trends | None:
        """Those of the process are one thread's: the losses of two models in one row would be a trend of nothing."""
        claimed = _Watching.trends
        return claimed[1] if claimed is not None and claimed[0] is self else None

    def _claim_trends(self) -> None:
        """The first thread that learns has them, until the main thread does: the same one on every rank."""
        free = _Watching.trends is None or self.thread is threading.main_thread()
        if free and self._trends is None:
            _Watching.trends = self, Trends()

    @_harmless
    def forward_begins(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wrapper: Any = None
    ) -> Call | None:
        """The outermost module is called; or the outermost of a training step that is run as the wrapper's forward."""
        self._tokens.forward_begins(module, args, kwargs)
        return self.guard.forward_begins(module, args, kwargs, wrapper)

    @_harmless
    def forward_ended(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None, result: Any
    ) -> None:
        self.guard.forward_ended(call, result)
        REPLICAS.forward_seen(module, args, kwargs, self._done, self._by_hand)
        if (trends := self._trends) is not None:
            trends.forward_ended(module, result)

    @_harmless
    def wrapper_ended(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training step was run as its forward: what that called has been told of already."""
        REPLICAS.forward_seen(module, args, kwargs, self._done)

    @_harmless
    def forward_failed(self) -> None:
        self._tokens.failed()
        self.guard.forward_failed()

    @_harmless
    def backward_begins(self, root: Any) -> None:
        """`root` is what `backward` was called on, or the first of several."""
        scaled = self._scaling.is_scaled(root)
        loss = reading_of(self._scaling.unscaled(root) if scaled else root)
        self.guard.backward_begins(root, loss, scaled=scaled, skipping=self._scaling.skipping)
        self._claim_trends()
        if (trends := self._trends) is not None:
            trends.backward_begins(loss)

    @_harmless
    def backward_ended(self) -> None:
        self.guard.backward_ended()

    @_harmless
    def exchange_in_pass(self, exchange: Exchange, *, in_backward: bool) -> torch.cuda.Stream | None:
        """The dispatcher is about to hand a collective to its backend, in the middle of a forward or a backward."""
        if in_backward:
            self._by_hand.exchange_begins(exchange)
        return self.guard.exchange_in_pass(exchange, in_backward=in_backward)

    @_harmless
    def exchange_after_backward(self, exchange: Exchange) -> None:
        self._by_hand.exchange_begins(exchange)
        self.guard.exchange_after_backward()

    @_harmless
    def norm_taken(self, norm: Any) -> None:
        """The script itself has asked for the norm of gradients."""
        self.guard.norm_taken(norm)

    @_harmless
    def optimizer_begins(self, optimizer: Any) -> None:
        self._scaling.optimizer_begins()
        if not self._scaling.decides(optimizer):
            for steps in _Watching.all:  # what one thread was refused ends the run, not that thread alone
                steps.guard.reports.refuse_if_halted()
            self.guard.optimizer_begins(optimizer)
        if (trends := self._trends) is not None:
            trends.optimizer_begins(optimizer)

    @_harmless
    def step_done(self) -> None:
        self._done += 1
        self.guard.step_done()
        if (trends := self._trends) is not None:
            trends.step_done()

    @_harmless
    def loss_scaled(self, loss: Any, scaled: Any) -> None:
        """GradScaler.scale was called."""
        self._scaling.scale(loss, scaled)

    @_harmless
    def scaler_step_begins(self) -> None:
        self._scaling.step_begins()

    @_harmless
    def scaler_step_ended(self, scaler: Any) -> None:
        self._scaling.step_ended(scaler)

    @_harmless
    def failed(self) -> None:
        """An exception ends the thread. A device's assertion shows only now, long after the forward that caused it."""
        self._tokens.failed()

    @_harmless
    def script_stops(self, frames: Sequence[tuple[FrameType, int]], said: str) -> None:
        """The script ends itself, at these lines and with these words."""
        self.guard.script_stops(frames, said, scaled=self._scaling.in_use)

    @_harmless
    def look_back(self) -> None:
        self.guard.look_back()

    @_harmless
    def flush(self) -> None:
        """Nothing more will come: what was held back for later is written."""
        self.guard.reports.flush()
        if (trends := self._trends) is not None:
            trends.flush()

    def forget(self) -> None:
        self._done = 0
        self._by_hand = ByHand()
        self.guard.forget()
        if (trends := self._trends) is not None:
            trends.forget()


class _Watching:
    on = True
    trends: tuple[Steps, Trends] | None = None
    all: ClassVar[list[Steps]] = []
    lock = threading.Lock()


def of_this_thread() -> Steps:
    """Those of a thread that has ended are taken over: a script may start a new one for every step."""
    here = threading.current_thread()
    with _Watching.lock:
        known = next((steps for steps in _Watching.all if steps.thread is here or not steps.thread.is_alive()), None)
        if known is None:
            known = Steps(here)
            _Watching.all.append(known)
        elif known.thread is not here:
            known.thread = here
            known.guard.forget_whose()
    return known


def process_fails() -> None:
    """An exception ends the process, or a thread of it."""
    for steps in _of_here():
        steps.failed()


def _of_here() -> list[Steps]:
    here = threading.current_thread()
    return [steps for steps in _Watching.all if steps.thread is here]


def process_stops(frames: Sequence[tuple[FrameType, int]], said: str) -> None:
    """By an exception that nobody catches, or by a call of exit with a code that is not 0."""
    for steps in _of_here():
        steps.script_stops(frames, said)


def looks_back() -> bool:
    """Something is known to be bad in the step that the process ends in, and not yet why."""
    return any(steps.guard.looks_back for steps in _of_here())


def look_back() -> None:
    for steps in _of_here():
        steps.look_back()


@_harmless
def process_ends() -> None:
    for steps in _Watching.all:
        steps.flush()
    REPLICAS.flush()


def forget_after_fork() -> None:
    """The child has one thread, and learns by itself."""
    _Watching.lock = threading.Lock()
    for steps in _Watching.all:
        steps.forget()
