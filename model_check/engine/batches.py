"""A micro-batch of any structure: a tensor, a dataclass, a dict, a tuple, and what is nested in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with its tensors changed; what is no tensor stays as it is."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return type(batch)(**{f.name: mapped(getattr(batch, f.name), change) for f in fields(batch)})
    if isinstance(batch, dict):
        return {key: mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(mapped(value, change) for value in batch)
    return batch


def named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a batch, by a name that a person understands."""
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


def samples(batch: Any, start: int, stop: int) -> Any:
    """The batch with some of its samples only; what is not per sample stays whole."""
    count = sample_count(batch)
    return mapped(batch, lambda tensor: tensor[start:stop] if tensor.ndim and tensor.shape[0] == count else tensor)
