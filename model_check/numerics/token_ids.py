"""Token ids that the embedding has no row for: read before the model fails on them, told when it does.

On the CPU the failing forward is looked at afterwards. On a GPU the failure is an assertion that takes the device with
it, so the largest id is copied to pinned memory ahead of the forward, where it can still be read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from model_check.blackbox.box import BOX
from model_check.blackbox.device_numbers import Reading, local, reading_of, tensors_in
from model_check.record.events.numerics import TokenRange

_IDS = (torch.int64, torch.int32)


class Tokens:
    """The ids of the forward in progress against the smallest embedding of the model."""

    def __init__(self) -> None:
        self._rows: weakref.WeakKeyDictionary[Any, tuple[str, int] | None] = weakref.WeakKeyDictionary()
        self._last: Callable[[], Any] = lambda: None  # the module that was asked about last
        self._embedding: tuple[str, int] | None = None
        self._largest: list[Reading] = []

    def forward_begins(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._largest.clear()
        if module is not self._last():
            if module not in self._rows:
                self._rows[module] = _first_embedding(module)
            self._last, self._embedding = weakref.ref(module), self._rows[module]
        if self._embedding is None:
            return
        given = (local(tensor) for tensor in tensors_in(args, kwargs) if tensor.dtype in _IDS and tensor.numel())
        for ids in [tensor for tensor in given if tensor is not None and tensor.dim()][:2]:
            largest = reading_of(ids.amax())
            if largest is not None:
                self._largest.append(largest)

    def failed(self) -> None:
        """The forward in progress, or something after it, raised: was it given an id without a row?"""
        largest = max((int(reading.value_without_device()) for reading in self._largest), default=-1)
        if self._embedding is not None and largest >= self._embedding[1]:
            BOX.event(TokenRange(largest=largest, rows=self._embedding[1], module=self._embedding[0]))
            self._largest.clear()


def _first_embedding(module: Any) -> tuple[str, int] | None:
    """The embedding that the ids go into: the first one that is registered. Others may be of positions or types."""
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Embedding):
            return name.removeprefix("module."), part.num_embeddings
    return None
