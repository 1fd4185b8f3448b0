"""Silent faults of replicas: parameters that drift apart, and ranks that are all given the same batch.

Ranks that hold the same parameters record sums over their bits, a few parameters at a time and the same ones at the
same step everywhere; likewise for the inputs of the first steps. Nothing is compared here: readers of the run directory
do that. Parameters should be equal under DistributedDataParallel, and where the script itself adds up their gradients
over a group (`by_hand`). All others are left alone, since they may differ between ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from model_check.blackbox.box import BOX
from model_check.blackbox.device_numbers import Reading, local, reading_of, tensors_in
from model_check.numerics.manual_reduction import LEARNED, ByHand

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
        self._pending: list[tuple[str, int, list[int], dict[str, Reading]]] = []

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
            self._later("param_hash", step, copies.group, sums)

    def _note_batch(self, module: Any, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        group = self._of(module)[0].group
        given = [plain for tensor in tensors_in(args, kwargs) if (plain := local(tensor)) is not None and plain.numel()]
        if len(group) < 2 or not given:
            return
        sums = {str(number): reading_of(bit_sum(t, 0, _BATCH_ELEMENTS)) for number, t in enumerate(given)}
        self._later("batch_hash", step, group, sums)

    def _later(self, event: str, step: int, group: list[int], sums: dict[str, Reading | None]) -> None:
        self._pending.append((event, step, group, {name: found for name, found in sums.items() if found is not None}))
        self.flush()

    def flush(self) -> None:
        """Writes what the device has answered."""
        while self._pending:
            event, step, group, sums = self._pending[0]
            if not all(reading.ready for reading in sums.values()):
                return
            del self._pending[0]
            BOX.event(event, step=step, group=group, hashes={name: found.value() for name, found in sums.items()})


def _due(step: int) -> bool:
    return step % (_CLOSE_EVERY if step < _CLOSE_STEPS else _EVERY) == 0


REPLICAS = Replicas()
