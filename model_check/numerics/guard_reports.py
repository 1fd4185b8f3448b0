"""Reports a foreign script's bad step, and refuses the step if the guard halts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from model_check.blackbox.box import BOX, GuardMode
from model_check.errors import NumericsError
from model_check.numerics.backward_passes import Pass
from model_check.numerics.blame import Hit, report_of
from model_check.numerics.probes import Probed, all_sizes, learning_rate
from model_check.numerics.step_history import History


class Reports:
    """The reports of one thread. One is enough: once weights are not finite, every later step would repeat it."""

    def __init__(self, mode: GuardMode) -> None:
        self.mode = mode
        self.history = History()
        self.told = False
        self._rate = math.nan
        self._eps: float | None = None
        self._refused: tuple[str, str | None] | None = None  # the message, and the code of the cause if it is known
        self._told_harmless = False
        self._held_back: dict[str, Any] | None = None

    @property
    def on(self) -> bool:
        return self.mode != "off" and not self.told and BOX.recorder is not None

    def settings_of(self, optimizer: Any) -> None:
        self._rate = learning_rate(optimizer)
        self._eps = optimizer.param_groups[0].get("eps")

    def step_over(self, loss: float, grad_norm: float) -> int:
        """The number of the step in the history."""
        return self.history.step(loss, grad_norm, self._rate)

    def refuse_if_halted(self) -> None:
        """Once a step has been refused, so is every later one: the run is over."""
        if self._refused is not None:
            said, code = self._refused
            raise NumericsError(said, remedy="the run was started with --guard halt", code=code)

    def harmless(self, step: int, bad: Pass, optimizer: Any) -> None:
        """Prepares one report of a loss that is not finite although its gradients are; the script's log shows the rest.

        `flush` writes it when the step is over: until then the gradients of a second optimizer may turn out bad.
        """
        if self._told_harmless:
            return
        self._told_harmless = True
        hit = bad.hit_of_its_loss()
        report = report_of(hit, self.history, rate=self._rate)
        if report is not None:
            harmless = "observed: every gradient is still finite, so the step spoils no weight"
            report = {**report, "evidence": [*report["evidence"], harmless]}
            grad_norm = math.hypot(*(size.value() for size in all_sizes(Probed.of(optimizer).all)))
            told = {"step": step, "loss": hit.loss, "grad_norm": grad_norm, "action": "observe", "spoils": False}
            self._held_back = {**told, **report}

    def flush(self) -> None:
        """Writes what was held back until the step was over."""
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            BOX.event("nonfinite", **held_back)

    def tell(
        self, step: int, hit: Hit, grad_norm: float | None, *, all_read: bool, stopped: bool = False, **more: Any
    ) -> None:
        """`all_read`: no gradient was left out."""
        self.told = True
        self._held_back = None
        action = "stopped" if stopped else "halt" if self.mode == "halt" else "observe"
        report = report_of(hit, self.history, rate=self._rate, eps=self._eps, all_read=all_read)
        if report is None:  # this rank is not to blame
            BOX.event("nonfinite_received", step=step, action=action, **hit.received)
        else:
            BOX.event("nonfinite", step=step, loss=hit.loss, grad_norm=grad_norm, action=action, **report, **more)
        if action == "halt":
            self._refused = _refusal(step, report)


def _refusal(step: int, report: Mapping[str, Any] | None) -> tuple[str, str | None]:
    who = f"rank {BOX.recorder.rank}: " if BOX.recorder is not None else ""
    cause = "a peer's gradients" if report is None else "this rank's own pass"
    where = f": {_in_words(report)}" if report is not None and report.get("location") else ""
    said = f"{who}step {step} is not applied: {cause} made its gradients non-finite{where}"
    return said, report["cause"] if report is not None else None


def _in_words(report: Mapping[str, Any]) -> str:
    """Such as `div at train.py:17 in forward`."""
    op, function = report.get("op"), report.get("function")
    return (f"{op} at " if op else "look at ") + str(report["location"]) + (f" in {function}" if function else "")
