"""What an optimizer is about to apply: its weights, its gradients, and how large those are that are looked at.

With the norms that the script itself takes of its gradients, to clip them or to show it: they have read them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from model_check.blackbox.device_numbers import Reading, capturing, gradient_of, local, norms_of, reading_of
from model_check.numerics.finite import finite

_SMALL = 1 << 14
_FIRST_FEW = 4  # parameters
_FEW = 512  # numbers
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Probed:
    """An optimizer's parameters: `early` ones, one of which is probed in every step, and all that are trained."""

    early: tuple[Any, ...]
    all: list[Any]

    @classmethod
    def of(cls, optimizer: Any) -> Probed:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and not is_lazy(p)]
        few = trained[:_FIRST_FEW]
        # The very first lies before every pole. Where it is too large to be read whole (an embedding, of which a batch
        # uses some rows), the smallest of the next (a bias, a norm) sums over every sample, at the smallest price.
        if few and few[0].numel() > _SMALL:
            few.sort(key=lambda p: int(p.numel()))
        return cls(tuple(few), trained)


def size_of(parameter: Any) -> Reading | None:
    """The norm of a gradient, or of the head of a large one."""
    gradient = gradient_of(parameter)
    if gradient is None or not (numbers := gradient.numel()):
        return None
    if gradient.is_cpu and gradient.dim() == 1 and numbers <= _FEW and gradient.is_floating_point():
        return Reading(math.hypot(*gradient.tolist()))  # operations of torch's cost more than so few numbers
    part = gradient.detach() if numbers <= _SMALL else gradient.detach().reshape(-1)[:_SMALL]
    return reading_of(torch.linalg.vector_norm(part, dtype=_WIDE.get(part.dtype)))


def all_sizes(parameters: list[Any]) -> list[Reading]:
    """The norms of all gradients, waited for."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = gradient_of(parameter)
        if gradient is not None and gradient.numel():
            by_device.setdefault(gradient.device, []).append(gradient.detach())
    norms = [found for gradients in by_device.values() if (found := norms_of(gradients)) is not None]
    return [Reading(norm) for found in norms for norm in found.value()]


def given_to(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients_finite(parameters: Iterable[Any]) -> bool:
    """Looks at all of them: asked only where something is known to be wrong."""
    return all(finite(gradient_of(parameter)) for parameter in parameters)


def learning_rate(optimizer: Any) -> float:
    rate = optimizer.param_groups[0].get("lr", math.nan)
    return float(rate) if isinstance(rate, (int, float)) else math.nan


_MOST = 4  # in a step: further ones are added up


class TakenNorms:
    """Those of one step."""

    def __init__(self) -> None:
        self._first: list[Reading] = []
        self._further: dict[torch.device, torch.Tensor] = {}  # sums

    def take(self, norm: Any) -> None:
        plain = local(norm)
        if plain is None or capturing(plain):
            return
        if len(self._first) < _MOST:
            if (taken := reading_of(plain)) is not None:
                self._first.append(taken)
            return
        # It clips layer by layer. A copy for each would be too dear; a sum is finite only if all that is in it is.
        with torch.no_grad():
            before = self._further.get(plain.device)
            self._further[plain.device] = plain.to(torch.float32, copy=True) if before is None else before + plain

    def all(self) -> list[Reading]:
        return [*self._first, *(Reading.of(total) for total in self._further.values())]

    def here(self) -> list[float]:
        """Of the first ones, those that the device has told."""
        return [norm.value() for norm in self._first if norm.ready]

    def forget(self) -> None:
        self._first.clear()
        self._further.clear()
