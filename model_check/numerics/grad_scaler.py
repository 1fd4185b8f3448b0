"""GradScaler: a healthy one skips a step now and then, to learn how far it may scale; one that never stops is ill."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch

from model_check.numerics.script_guard import Guard

_SKIPS_IN_A_ROW = 10
_LEAST_SCALE = 1.0


class Scaling:
    """Which losses are scaled, and how many steps the scaler has left out in a row."""

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
