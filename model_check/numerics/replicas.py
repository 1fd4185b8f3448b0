"""Silent faults of replicas: parameters that drift apart, and ranks that are all given the same batch.

Ranks that hold the same parameters record sums over their bits, a few parameters at a time and the same ones at the
same step everywhere; likewise for the inputs of the first steps. Nothing is compared here: readers of the run directory
do that. Parameters should be equal under DistributedDataParallel, and where the script itself adds up their gradients
over a group. Which ones those are we learn from its first steps (`ByHand`): the script reduces each gradient directly,
or all of them in flat buffers. Anything it does not reduce may differ: experts, stages, shards, halves of a GAN. A
script that makes a step without any exchange lets its ranks differ on purpose.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from model_check.blackbox.box import BOX
from model_check.blackbox.device_numbers import Reading, gradient_of, local, reading_of, tensors_in
from model_check.blackbox.native_collectives import Exchange
from model_check.record.events.numerics import BatchSums, ParameterSums

LEARNED = 2  # steps
_MOST_MODULES = 16
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")

Group = tuple[int, ...]


class ByHand:
    """The exchanges that one thread of a process makes by hand."""

    def __init__(self) -> None:
        self.off = False
        self._modules: list[weakref.ref[Any]] = []
        self._shared: dict[Group, set[int]] = {}  # ids of parameters, which live as long as their module
        self._in_buffers: Counter[Group] = Counter()  # elements exchanged in flat buffers in this step
        self._exchanged = False
        self._step = 0

    def forward_seen(self, module: Any, step: int) -> None:
        """`step`: the number of steps done so far."""
        if step > self._step:
            self.off = self.off or not self._exchanged
            self._step, self._exchanged = step, False
            self._in_buffers.clear()
        if any(base.__name__ in _WRAPPERS for base in type(module).__mro__):
            self.off = True
        if not self.off and step < LEARNED and module not in self._known() and len(self._modules) < _MOST_MODULES:
            self._modules.append(weakref.ref(module))

    def exchange_begins(self, exchange: Exchange) -> None:
        """An exchange after a forward: of gradients, or of something else that is added up."""
        if self.off or not any(tensor.is_floating_point() for tensor in exchange.given):
            return
        self._exchanged = True
        if self._step >= LEARNED or not self._modules:
            return
        process_group = torch.distributed.ProcessGroup.unbox(exchange.group)
        group = tuple(torch.distributed.get_process_group_ranks(process_group))
        with_gradient = [
            (parameter, gradient)
            for module in self._known()
            for parameter in module.parameters()
            if (gradient := gradient_of(parameter)) is not None and gradient.layout is torch.strided
        ]
        places = {_place(tensor) for tensor in exchange.given if tensor.layout is torch.strided}
        reduced = [parameter for parameter, gradient in with_gradient if _place(gradient) in places]
        if not reduced:
            self._in_buffers[group] += sum(tensor.numel() for tensor in exchange.given if tensor.dim() == 1)
            if self._in_buffers[group] == sum(gradient.numel() for _, gradient in with_gradient):
                reduced = [parameter for parameter, _ in with_gradient]
        self._shared.setdefault(group, set()).update(map(id, reduced))

    def shared(self, module: Any) -> dict[Group, list[tuple[str, Any]]]:
        """The module's parameters that are equal on all ranks of a group. Names from a second module say so."""
        known = self._known()
        number = next((at for at, one in enumerate(known, start=1) if one is module), 0)
        suffix = f" of module {number}" if number > 1 else ""
        return {
            group: [(f"{name}{suffix}", p) for name, p in module.named_parameters() if id(p) in parameters]
            for group, parameters in self._shared.items()
            if number
        }

    def _known(self) -> list[Any]:
        return [module for known in self._modules if (module := known()) is not None]


_CLOSE_STEPS = 100  # compared every tenth step at first, later every hundredth
_CLOSE_EVERY, _EVERY = 10, 100
_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # looked at in one check
_PARAMETERS = 32
_HEAD = 1 << 10  # of every parameter, in the first check
_MOST_HEADS = 512
_BATCH_STEPS = 8
_BATCH_ELEMENTS = 1 << 16
_WIDE = 8


def bit_sum(tensor: torch.Tensor, start: int = 0, end: int | None = None) -> torch.Tensor:
    """The sum over the bits of a part of a tensor, as whole numbers that wrap around: one changed bit changes it."""
    flat = tensor.detach().reshape(-1)[start:end]
    if flat.dtype == torch.bool or flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat.view(torch.uint8)
    size = flat.element_size()
    aligned = flat.storage_offset() * size % _WIDE == 0 and size <= _WIDE
    wide = flat.numel() * size // _WIDE * _WIDE // size if aligned else 0
    narrow = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    total = flat[wide:].view(narrow).sum(dtype=torch.int64)
    return total + flat[:wide].view(torch.int64).sum() if wide else total


@dataclass(frozen=True)
class _Piece:
    name: str
    tensor: torch.Tensor
    start: int
    end: int

    @property
    def label(self) -> str:
        whole = self.start == 0 and self.end == self.tensor.numel()
        return self.name if whole else f"{self.name}[{self.start}:{self.end}]"


class _Copies:
    """Parameters that all ranks of a group hold, in the same order on every rank."""

    def __init__(self, group: list[int], parameters: list[tuple[str, torch.Tensor]]) -> None:
        self.group = group
        self.parameters = parameters
        self.hashed_step = -1
        self._next = (0, 0)

    @classmethod
    def under_ddp(cls, module: Any) -> _Copies:
        ignored = set(getattr(module, "parameters_to_ignore", ()))
        named = [(name, p) for name, p in module.module.named_parameters() if name not in ignored]
        # Local SGD lets replicas differ on purpose between its averages.
        hooks = [getattr(hook, "__qualname__", str(hook)).lower() for hook, _ in getattr(module, "_comm_hooks", ())]
        return cls(_members(module), [] if any("local" in name for name in hooks) else whole_ones(named))

    def heads(self) -> list[_Piece]:
        return [_Piece(n, p, 0, min(p.numel(), _HEAD)) for n, p in self.parameters[:_MOST_HEADS]]

    def take_turn(self) -> list[_Piece]:
        """The parameters whose turn it is; a large one is taken in parts."""
        if not self.parameters:
            return []
        room = _ELEMENTS[self.parameters[0][1].device.type]
        pieces: list[_Piece] = []
        number, start = self._next
        while room > 0 and len(pieces) < min(_PARAMETERS, len(self.parameters)):
            name, parameter = self.parameters[number]
            end = min(parameter.numel(), start + (room + _WIDE - 1) // _WIDE * _WIDE)
            pieces.append(_Piece(name, parameter, start, end))
            room -= end - start
            if end < parameter.numel():
                start = end
            else:
                number, start = (number + 1) % len(self.parameters), 0
        self._next = number, start
        return pieces


def whole_ones(named: Iterable[tuple[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """Leaves out shards, which are meant to differ between ranks."""
    plain = [(name, local(parameter)) for name, parameter in named if not hasattr(parameter, "_local_tensor")]
    return [(name, tensor) for name, tensor in plain if tensor is not None and tensor.numel()]


def _members(module: Any) -> list[int]:
    group = getattr(module, "process_group", None)
    if group is None or not torch.distributed.is_initialized():
        return []
    return list(torch.distributed.get_process_group_ranks(group))


class Replicas:
    """All modules of this process that are replicas of their peers'."""

    def __init__(self) -> None:
        self._copies: weakref.WeakKeyDictionary[Any, list[_Copies]] = weakref.WeakKeyDictionary()
        self._batch_step = -1
        self._pending: list[tuple[ParameterSums | BatchSums, dict[str, Reading]]] = []

    def forward_seen(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], step: int, by_hand: ByHand | None = None
    ) -> None:
        """`step`: those that the thread has done. What other threads do meanwhile is not the same on every rank."""
        if BOX.recorder is None or not torch.is_grad_enabled():
            return
        self.flush()
        if type(module).__name__ != "DistributedDataParallel":
            if by_hand is not None:
                self._by_hand_seen(module, step, by_hand)
            return
        if step < _BATCH_STEPS and step != self._batch_step:
            self._batch_step = step
            self._note_batch(module, step, args, kwargs)
        if _due(step):
            self.note_parameters(module, step)

    def _by_hand_seen(self, module: Any, step: int, by_hand: ByHand) -> None:
        by_hand.forward_seen(module, step)
        if by_hand.off or step < LEARNED:
            return
        if module not in self._copies:
            self._copies[module] = [
                _Copies(list(group), whole_ones(named)) for group, named in by_hand.shared(module).items()
            ]
        if step == LEARNED or _due(step):
            self.note_parameters(module, step, first=LEARNED)

    def step_begins(self, module: Any, batch: Any) -> None:
        """For a trainer whose forwards are not instrumented: once a step, with its first batch."""
        given = batch if isinstance(batch, (tuple, list, dict)) else (getattr(batch, "tokens", batch),)
        self.forward_seen(module, (given,), {}, BOX.recorder.steps if BOX.recorder is not None else 0)

    def _of(self, module: Any) -> list[_Copies]:
        copies = self._copies.get(module)
        if copies is None:
            copies = self._copies[module] = [_Copies.under_ddp(module)]
        return copies

    def note_parameters(self, module: Any, step: int, first: int = 0) -> None:
        """Records the bits of the parameters whose turn it is; at the first check, the head of each parameter."""
        for copies in self._of(module):
            if len(copies.group) < 2 or not copies.parameters or step == copies.hashed_step:
                continue
            copies.hashed_step = step
            pieces = copies.heads() if step == first else copies.take_turn()
            sums = {piece.label: reading_of(bit_sum(piece.tensor, piece.start, piece.end)) for piece in pieces}
            self._later(ParameterSums(step=step, group=tuple(copies.group)), sums)

    def _note_batch(self, module: Any, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        group = self._of(module)[0].group
        given = [plain for tensor in tensors_in(args, kwargs) if (plain := local(tensor)) is not None and plain.numel()]
        if len(group) < 2 or not given:
            return
        sums = {str(number): reading_of(bit_sum(t, 0, _BATCH_ELEMENTS)) for number, t in enumerate(given)}
        self._later(BatchSums(step=step, group=tuple(group)), sums)

    def _later(self, event: ParameterSums | BatchSums, sums: dict[str, Reading | None]) -> None:
        self._pending.append((event, {name: found for name, found in sums.items() if found is not None}))
        self.flush()

    def flush(self) -> None:
        """Writes what the device has answered."""
        while self._pending:
            event, sums = self._pending[0]
            if not all(reading.ready for reading in sums.values()):
                return
            del self._pending[0]
            BOX.event(replace(event, hashes={name: found.value() for name, found in sums.items()}))


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _due(step: int) -> bool:
    return step % (_CLOSE_EVERY if step < _CLOSE_STEPS else _EVERY) == 0


REPLICAS = Replicas()
