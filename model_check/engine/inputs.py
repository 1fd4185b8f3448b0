"""What a step was given, kept until its numbers are known to be good: with it the step can be run again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomState:
    """Every generator of this process. Reading the device's does not wait for the device."""

    device: torch.device
    python: Any
    numpy: Any
    host: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


@dataclass(frozen=True)
class StepInputs:
    """One step's micro-batches, learning rate and random state. Batches are kept by reference: they cost nothing."""

    step: int
    rate: float
    micro_batches: tuple[Any, ...]
    random: RandomState


def named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a batch of any structure, by a name that a person understands."""
    if isinstance(batch, torch.Tensor):
        yield name or "0", batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        for part in fields(batch):
            yield from named_tensors(getattr(batch, part.name), _below(name, part.name))
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from named_tensors(value, _below(name, str(key)))
    elif isinstance(batch, (tuple, list)):
        for index, value in enumerate(batch):
            yield from named_tensors(value, _below(name, str(index)))


def _below(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def sample_count(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of its first tensor."""
    first = next(named_tensors(batch), None)
    return first[1].shape[0] if first is not None and first[1].ndim else 0


def one_sample(batch: Any, row: int, count: int) -> Any:
    """The batch with one of its samples only; what is not per sample stays whole."""
    if isinstance(batch, torch.Tensor):
        return batch[row : row + 1] if batch.ndim and batch.shape[0] == count else batch
    if is_dataclass(batch) and not isinstance(batch, type):
        parts = {f.name: one_sample(getattr(batch, f.name), row, count) for f in fields(batch)}
        return replace(batch, **parts)
    if isinstance(batch, dict):
        return {key: one_sample(value, row, count) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(one_sample(value, row, count) for value in batch)
    return batch
