"""Numbers that a device knows later: asking for one never makes the device wait.

On the CPU the value is there at once. On a GPU it is copied to pinned memory behind the kernels that compute it, and
an event says when the copy is done.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST_TENSORS = 16
_NARROW = (torch.float16, torch.bfloat16)


def local(tensor: Any) -> torch.Tensor | None:
    """The part of a tensor that this rank holds, as a plain tensor; None for fake, traced and other exotic ones."""
    if type(tensor) not in _PLAIN:
        tensor = getattr(tensor, "_local_tensor", None)  # a DTensor: its operations would be collectives
        if type(tensor) not in _PLAIN:
            return None
    if is_functorch_wrapped_tensor(tensor):  # inside vmap a plain one by its type, without numbers of its own
        return None
    return tensor if (tensor.is_cpu or tensor.is_cuda) and tensor.layout is torch.strided else None


def gradient_of(parameter: Any) -> torch.Tensor | None:
    """What this rank holds of a parameter's gradient; of a sparse one the numbers that it lists."""
    gradient = parameter.grad
    if type(gradient) is torch.Tensor and gradient.layout is torch.sparse_coo:
        gradient = gradient._values()
    return local(gradient)


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results, a few levels deep: tuples, lists, dicts, what acts like one, dataclasses."""
    found = 0
    waiting: list[tuple[Any, int]] = [(value, 0) for value in reversed(values)]
    while waiting and found < _MOST_TENSORS:
        value, depth = waiting.pop()
        if isinstance(value, torch.Tensor):
            found += 1
            yield value
        elif depth < 3 and isinstance(value, (list, tuple)):
            waiting += [(item, depth + 1) for item in reversed(value[:_MOST_TENSORS])]
        elif depth < 3 and hasattr(value, "keys") and callable(getattr(value, "values", None)):
            waiting += [(item, depth + 1) for item in reversed(list(value.values())[:_MOST_TENSORS])]
        elif depth < 3 and dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)][:_MOST_TENSORS]
            waiting += [(getattr(value, name, None), depth + 1) for name in reversed(names)]


class _Slot:
    """Pinned memory of one shape with the event of the copy into it: lent again and again, and never freed.

    Freeing either asks the device. After an assertion in a kernel that fails, in a destructor, and the process would
    abort where the script was about to see its own exception.
    """

    __slots__ = ("_home", "done", "memory")

    def __init__(self, tensor: torch.Tensor, home: deque[_Slot]) -> None:
        self._home = home
        self.memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self.done = torch.cuda.Event()
        for kept in (self.memory, self.done):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # outlives the interpreter's own tidying up too

    @classmethod
    def for_copy_of(cls, tensor: torch.Tensor) -> _Slot:
        home = _SLOTS.setdefault((tensor.device.index, tensor.dtype, tuple(tensor.shape)), deque())
        try:
            lent = home.popleft()
        except IndexError:
            return cls(tensor, home)
        if lent.done.query():
            return lent
        home.appendleft(lent)  # its reading was dropped while the copy was still under way
        return cls(tensor, home)

    def give_back(self) -> None:
        self._home.append(self)


_SLOTS: dict[tuple[int | None, torch.dtype, tuple[int, ...]], deque[_Slot]] = {}


class Reading:
    """One number on its way from the device, or already here."""

    __slots__ = ("_held", "_slot")

    def __init__(self, held: Any, slot: _Slot | None = None) -> None:
        self._held = held
        self._slot = slot

    def __del__(self) -> None:
        if self._slot is not None:
            self._slot.give_back()

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Reading:
        """A plain tensor's numbers: of one element the number itself, of several a list."""
        if tensor.is_cpu:
            return cls(tensor.tolist())  # unlike `item`, no operation of torch's: half the price once caches are cold
        slot = _Slot.for_copy_of(tensor)
        slot.memory.copy_(tensor.detach(), non_blocking=True)
        slot.done.record(torch.cuda.current_stream(tensor.device))  # the script may not have chosen its device
        return cls(None, slot)

    @property
    def ready(self) -> bool:
        return self._slot is None or bool(self._slot.done.query())

    def value(self) -> Any:
        """The number; waits for it where it is not there yet."""
        if self._slot is not None:
            self._slot.done.synchronize()
            self._held = self._slot.memory.tolist()
            self._slot.give_back()
            self._slot = None
        return self._held

    def value_without_device(self) -> Any:
        """What the pinned memory holds, when the device itself can no longer be asked, e.g. after an assertion."""
        return self._held if self._slot is None else self._slot.memory.tolist()


def reading_of(scalar: Any) -> Reading | None:
    """A reading of a tensor with one element; None for an exotic one, and while a graph is captured."""
    plain = local(scalar)
    if plain is None or plain.numel() != 1 or plain.is_complex() or capturing(plain):
        return None
    return Reading.of(plain if plain.dim() == 0 else plain.detach().reshape(()))


def norms_of(tensors: list[torch.Tensor]) -> Reading | None:
    """The norms of plain tensors of one device, as one reading; None for none, and while a graph is captured."""
    if not tensors or capturing(tensors[0]):
        return None
    narrow = all(tensor.dtype in _NARROW for tensor in tensors)  # a norm of halves leaves their range in good health
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32 if narrow else None)
    return Reading.of(torch.stack([norm.float() for norm in norms]))


def capturing(tensor: torch.Tensor) -> bool:
    """A graph is being captured where this tensor lives: nothing may be read now."""
    if tensor.is_cpu:
        return False
    if tensor.device.index == torch.cuda.current_device():
        return bool(torch.cuda.is_current_stream_capturing())
    with torch.cuda.device(tensor.device):
        return bool(torch.cuda.is_current_stream_capturing())
