"""The loss of every step, and now and then the size of gradients and outputs: what early warnings are made of.

Everything is read behind the device and written in handfuls, so that a step pays for a number and not for a file.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch

from model_check.blackbox.box import BOX
from model_check.blackbox.device_numbers import Reading, local, norms_of, reading_of, tensors_in
from model_check.record.events.numerics import Gradients, Losses

_LOSSES_AT_ONCE = 50
_WRITE_AFTER_S = 5.0
_LOOK_EVERY = 50  # steps between two looks at all gradients, in the first 5,000
_MOST_PARAMETERS = 256
_MOST_NAMES = 8
_MOST_LOSSES = 20_000  # of a long job only every k-th is kept: the file stays small


class Trends:
    """One process's numbers, on their way into its events."""

    def __init__(self) -> None:
        self._losses: list[tuple[int, Reading]] = []
        self._step_loss: Reading | None = None
        self._written_at = 0.0
        self._names: dict[int, str] = {}
        self._largest_output: Reading | None = None
        self._choices = 0
        self._looks: list[tuple[Gradients, list[str], Reading, Reading | None]] = []

    def _step(self) -> int:
        return BOX.recorder.steps if BOX.recorder is not None else 0

    def _looking(self) -> bool:
        step = self._step()
        # Half as often each time the job's length doubles: a look takes kilobytes, and a day has a million steps.
        every = _LOOK_EVERY << (step // (100 * _LOOK_EVERY)).bit_length()
        return step > 0 and step % every == 0

    def forward_ended(self, module: Any, result: Any) -> None:
        """Now and then: how large the outputs are, and what the parameters are called."""
        if not self._looking() or not torch.is_grad_enabled():
            return
        self._names.update((id(p), name.removeprefix("module.")) for name, p in module.named_parameters())
        output = next((t for t in tensors_in(result) if t.is_floating_point() and t.dim() > 1), None)
        plain = local(output) if output is not None else None
        if plain is None or not plain.numel():
            return
        self._largest_output = reading_of(plain.detach().abs().amax())
        self._choices = plain.shape[-1]

    def backward_begins(self, loss: Reading | None) -> None:
        if loss is not None:
            self._step_loss = loss

    def optimizer_begins(self, optimizer: Any) -> None:
        if not self._looking() or (self._looks and self._looks[-1][0].step == self._step()):
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]][:_MOST_PARAMETERS]
        found = [
            (n, p, plain) for n, p in enumerate(parameters) if (plain := local(p.grad)) is not None and plain.numel()
        ]
        found = [(n, p, plain) for n, p, plain in found if plain.device == found[0][2].device]
        # Optimizers are given matrices and vectors apart; where a gradient stops is seen in the order of the model.
        order = {known: place for place, known in enumerate(self._names)}
        found.sort(key=lambda item: order.get(id(item[1]), len(order)))
        trained = [p for p in parameters if p.requires_grad]
        # None at all is worth a look too: the optimizer may have been given another model's parameters.
        norms = norms_of([plain.detach() for _, _, plain in found]) if found else Reading([])
        if norms is None or not trained or (not found and any(p.grad is not None for p in trained)):
            return
        named = [self._names.get(id(p), f"parameter {n}") for n, p, _ in found]
        rates = [group.get("lr") for group in optimizer.param_groups]
        look = Gradients(
            step=self._step(),
            choices=self._choices,
            lr=tuple(float(rate) for rate in rates if isinstance(rate, (int, float))),
            frozen=tuple(self._names.get(id(p), "?") for p in parameters if not p.requires_grad)[:_MOST_NAMES],
            without_gradient=tuple(self._names.get(id(p), "?") for p in trained if p.grad is None)[:_MOST_NAMES],
            parameters=len(parameters),
        )
        self._looks.append((look, named, norms, self._largest_output))
        self._largest_output = None

    def step_done(self) -> None:
        step = self._step() - 1
        every = max(1, step // _MOST_LOSSES)
        if self._step_loss is not None and step % every == 0:
            self._losses.append((step, self._step_loss))
        self._step_loss = None
        if self._looks and self._looks[0][0].step < step:
            self._write_look()
        full = len(self._losses) >= _LOSSES_AT_ONCE
        if full or (len(self._losses) > 1 and time.monotonic() - self._written_at > _WRITE_AFTER_S):
            self.flush()

    def _write_look(self) -> None:
        look, names, norms, largest = self._looks.pop(0)
        sizes = {name: _short(norm) for name, norm in zip(names, norms.value(), strict=True)}
        output = _short(largest.value()) if largest is not None else None
        BOX.event(replace(look, norms=sizes, largest_output=output))

    def flush(self) -> None:
        """Writes what is known; the newest loss may still be on its way."""
        self._written_at = time.monotonic()
        # After the last step none comes that would write its look.
        while self._looks and all(reading.ready for reading in self._looks[0][2:] if reading is not None):
            self._write_look()
        known = [(step, loss.value()) for step, loss in self._losses if loss.ready]
        self._losses = [(step, loss) for step, loss in self._losses if not loss.ready]
        if known:
            steps, values = zip(*known, strict=True)
            BOX.event(Losses(steps=steps, values=tuple(map(_short, values))))

    def forget(self) -> None:
        self.__init__()  # type: ignore[misc]


def _short(value: float) -> float:
    """Six digits are enough to see a trend."""
    return float(f"{value:.6g}") if math.isfinite(value) else value
