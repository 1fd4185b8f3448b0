"""The last steps of a script in three numbers each: loss, size of a gradient, learning rate."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import replace
from itertools import pairwise

from model_check.numerics.causes import RATE_JUMP, StepNumbers

_KEPT = 64
_EARLY_STEPS = 20
_FAR = 10.0


class History:
    """What led up to a step."""

    def __init__(self) -> None:
        self.before: deque[StepNumbers] = deque(maxlen=_KEPT)
        self.steps = 0

    def step(self, loss: float, gradient: float, rate: float) -> int:
        """Its number, from 1."""
        self.steps += 1
        self.before.append(StepNumbers(loss, gradient, rate))
        return self.steps

    def learn(self, number: int, gradient: float) -> None:
        """How large the gradient of an earlier step was: a device tells later."""
        place = len(self.before) - 1 - (self.steps - number)
        if place >= 0:
            self.before[place] = replace(self.before[place], grad_norm=gradient)

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.before if math.isfinite(step.loss)]

    def diverges_from_the_start(self, loss: float = math.nan) -> bool:
        """Every update since the first made the loss larger. `loss`: of the step in progress, where it is finite."""
        losses = self._and(loss)
        if not 2 <= len(losses) <= _EARLY_STEPS or self.steps > _EARLY_STEPS:
            return False
        return all(after > before for before, after in pairwise(losses)) and losses[-1] > _FAR * abs(losses[0])

    def rate_jump(self) -> tuple[float, float] | None:
        """The learning rate before and after it jumped, if the loss has been off its level ever since."""
        steps = list(self.before)
        for number in range(len(steps) - 1, 0, -1):
            slow, fast = steps[number - 1].lr, steps[number].lr
            if slow > 0 and fast >= RATE_JUMP * slow:
                usual = statistics.median(abs(step.loss) for step in steps[:number])
                since = [abs(step.loss) for step in steps[number + 1 :] if not abs(step.loss) <= _FAR * usual]
                return (slow, fast) if len(since) == len(steps) - number - 1 else None
        return None

    def shown(self, loss: float = math.nan, most: int = 5) -> str:
        """The newest; `loss` as above."""
        return ", ".join(f"{number:.4g}" for number in self._and(loss)[-most:])

    def _and(self, loss: float) -> list[float]:
        return [*self.losses, loss] if math.isfinite(loss) else self.losses
