"""The norms that a script takes of its gradients, to clip them or to show it: they have read them all."""

from __future__ import annotations

from typing import Any

import torch

from model_check.blackbox.device_numbers import Reading, capturing, local, reading_of

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
