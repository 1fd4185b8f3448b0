"""Batches from the loader onto the device, ahead of the step that needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def to_device(value: Any, device: torch.device) -> Any:
    """The same structure with its tensors on the device; copies from pinned memory do not block."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: to_device(getattr(value, f.name), device) for f in fields(value)})
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(v, device) for v in value)
    return value


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    for batch in batches:
        yield to_device(batch, device)
