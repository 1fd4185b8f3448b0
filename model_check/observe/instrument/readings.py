"""Numbers that a device knows later: asking for one never makes the device wait.

On the CPU the value is there at once. On a GPU it is copied to pinned memory behind the kernels that compute it, and
an event says when the copy is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST_TENSORS = 16


def local(tensor: Any) -> torch.Tensor | None:
    """The part of a tensor that this rank holds, as a plain tensor; None for fake, traced and other exotic ones."""
    held = getattr(tensor, "_local_tensor", None)  # a DTensor: its operations would be collectives
    if held is not None:
        tensor = held
    if type(tensor) not in _PLAIN or tensor.is_sparse or tensor.device.type not in ("cpu", "cuda"):
        return None
    return tensor


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results, a few levels deep: tuples, lists, dicts and objects that act like dicts."""
    found = 0
    waiting: list[tuple[Any, int]] = [(value, 0) for value in reversed(values)]
    while waiting and found < _MOST_TENSORS:
        value, depth = waiting.pop()
        if isinstance(value, torch.Tensor):
            found += 1
            yield value
        elif depth < 3 and isinstance(value, (list, tuple)):
            waiting += [(item, depth + 1) for item in reversed(value[:_MOST_TENSORS])]
        elif depth < 3 and hasattr(value, "values") and hasattr(value, "keys"):
            waiting += [(item, depth + 1) for item in reversed(list(value.values())[:_MOST_TENSORS])]


class Reading:
    """One number on its way from the device."""

    __slots__ = ("_done", "_held")

    def __init__(self, scalar: torch.Tensor) -> None:
        self._done: Any = None
        if scalar.device.type == "cpu":
            self._held: Any = scalar.item()
            return
        self._held = torch.empty((), dtype=scalar.dtype, pin_memory=True)
        self._held.copy_(scalar.detach(), non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    @property
    def ready(self) -> bool:
        return self._done is None or bool(self._done.query())

    def value(self) -> int | float:
        """The number; waits for it where it is not there yet."""
        if self._done is not None:
            self._done.synchronize()
            self._held, self._done = self._held.item(), None
        return self._held

    def value_without_device(self) -> int | float:
        """What the pinned memory holds, when the device itself can no longer be asked, e.g. after an assertion."""
        return self._held if self._done is None else self._held.item()


def reading_of(scalar: Any) -> Reading | None:
    """A reading of a tensor with one element; None for an exotic one, and while a graph is captured."""
    plain = local(scalar)
    if plain is None or plain.numel() != 1 or plain.is_complex():
        return None
    if plain.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    return Reading(plain.detach().reshape(()))
