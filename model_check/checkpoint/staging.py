"""A copy of a rank's share that stays as it is while training goes on, at the least cost to training.

On a GPU each part goes to the first of these that has room:

    device     spare memory of the GPU: a copy inside it takes milliseconds; the writer fetches it at leisure
    pinned     host memory made before the first save: copied on a stream of its own beside the next forward and
               backward pass, which only read parameters; the optimizer step waits, on the device, for its end
    pageable   any other host memory: training waits for the copy

On the CPU all is pageable. Spare means: what no other part of the job has asked for, less a margin.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from model_check.checkpoint.parts import Part, as_bytes

# A later step may take so much more of the device; pinned memory is made for what would then not fit there.
_DRIFT_BYTES = 8 << 30
_DEVICE_BLOCK_BYTES = 16 << 30
# A power of two: torch's allocator of pinned memory rounds up to one.
SLAB_BYTES = 1 << 28
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


@dataclass(frozen=True)
class Limits:
    """How much memory a copy may take."""

    device_margin: int = 6 << 30  # bytes of the GPU that stay free: a later step may need a little more
    pinned_share: float = 0.6  # of the free host memory: pinned pages can never be taken back by the system
    pageable_share: float = 0.9


def fitting(sizes: Mapping[int, int], room: int) -> list[int]:
    """The numbers of the parts that fit into `room` bytes: takes the largest first, returns them in the order given."""
    chosen = set()
    for index in sorted(sizes, key=lambda index: -sizes[index]):
        if sizes[index] <= room:
            chosen.add(index)
            room -= sizes[index]
    return [index for index in sizes if index in chosen]


@dataclass
class Staged:
    """Parts to be written, and the moments on the device after which their bytes are there."""

    parts: list[Part]
    is_copy: bool  # training may go on and change what it was copied from
    note: str = ""
    _ready: list[torch.cuda.Event] = field(default_factory=list)
    _copied: torch.cuda.Event | None = None  # until then training must not change what is being copied
    _held: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    _alive: list[Any] = field(default_factory=list)  # memory that a copy under way reads or writes

    def take(self, index: int, contents: tuple[Tensor, ...]) -> None:
        """The bytes of this part are in `contents` now."""
        self.parts[index] = replace(self.parts[index], contents=contents)

    def lends(self, memory: Any, until: torch.cuda.Event | None = None) -> None:
        """Keeps `memory` until the parts are written; they are there after `until`."""
        self._alive.append(memory)
        if until is not None:
            self._ready.append(until)

    def copied_at(self, moment: torch.cuda.Event) -> None:
        """Training may change what was copied from this moment of the device on."""
        self._copied = moment
        self._ready.append(moment)

    def settle(self) -> None:
        """Waits until every byte is where the parts say; for the thread that writes them."""
        for event in self._ready:
            event.synchronize()

    def hold_update(self) -> None:
        """The device does what comes next after the copy; the host goes on at once."""
        if self._copied is None or self._held is not None:
            return
        stream = torch.cuda.current_stream()
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(self._copied)
        after.record(stream)
        self._held = before, after

    def device_wait_s(self) -> float | None:
        """How long the device stood still in `hold_update`; None as long as that is not known."""
        if self._held is None or not self._held[1].query():
            return None
        return self._held[0].elapsed_time(self._held[1]) / 1e3

    def release(self) -> None:
        """Lets go of the copies; a pool of the device goes after what lies in it."""
        self.parts = []
        self._alive = []


def free_host_bytes(cgroups: tuple[tuple[Path, Path], ...] = _CGROUPS) -> int:
    """What the machine can still give, or the control group where that is less."""
    free = psutil.virtual_memory().available
    for limit, used in cgroups:
        try:
            free = min(free, int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):
            continue  # not there, or "max"
    return max(0, free)


class PinnedSlabs:
    """Pinned memory in equal slabs, kept from save to save, made beside training.

    Pinning a gigabyte takes a good part of a second and holds up other calls into the driver: hence small slabs.
    """

    def __init__(self) -> None:
        self.slabs: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self.refused: str | None = None  # why there is less than was asked for

    def grow(self, total: int, device: torch.device) -> None:
        """Begins to make slabs until there are `total` bytes of them."""
        self.settle()
        self.refused = None
        missing = -(-total // SLAB_BYTES) - len(self.slabs)
        if missing > 0:
            self._thread = threading.Thread(
                target=self._make, args=(missing, device), name="checkpoint-pin", daemon=True
            )
            self._thread.start()

    @property
    def is_growing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def settle(self) -> int:
        """Waits for what is being made; the bytes there are."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return len(self.slabs) * SLAB_BYTES

    def _make(self, count: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            for _ in range(count):
                try:
                    self.slabs.append(torch.empty(SLAB_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True))
                except RuntimeError as error:
                    self.refused = str(error).splitlines()[0]
                    return


def cut_up(slabs: list[Tensor], sizes: list[int]) -> Iterator[tuple[Tensor, ...]]:
    """Consecutive pieces of the slabs, flat: for each size one, or several where it reaches over the end of a slab."""
    number, at = 0, 0
    for size in sizes:
        pieces = []
        while size:
            length = min(size, slabs[number].numel() - at)
            pieces.append(slabs[number][at : at + length])
            size, at = size - length, at + length
            if at == slabs[number].numel():
                number, at = number + 1, 0
        yield tuple(pieces)


class Staging:
    """Memory for the copies of one rank, kept from save to save (but for the device's, which training may need)."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._pageable = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._slabs = PinnedSlabs()
        self._stream: torch.cuda.Stream | None = None
        self._ranks_on_host = 1

    def prepare(self, parts: Sequence[Part], *, ranks_on_host: int) -> None:
        """Begins to make the pinned memory that a save of such parts will need; returns at once."""
        on_device = [part for part in parts if part.device.type == "cuda"]
        if not on_device:
            return
        device = on_device[0].device
        self._ranks_on_host = ranks_on_host
        sizes = {index: part.nbytes for index, part in enumerate(on_device)}
        inside = fitting(sizes, max(0, self._device_room(device) - _DRIFT_BYTES))
        self._pin(sum(sizes.values()) - sum(sizes[index] for index in inside), device)

    @property
    def is_preparing(self) -> bool:
        """Pinned memory is still being made."""
        return self._slabs.is_growing

    def _pin(self, missing: int, device: torch.device) -> None:
        """Begins to make so many bytes of pinned memory more, or what this rank may take of the host's."""
        room = int(free_host_bytes() * self._limits.pinned_share / self._ranks_on_host)
        self._slabs.grow(self._slabs.settle() + min(missing, room), device)

    def live(self, parts: Sequence[Part]) -> Staged:
        """No copy: the parts as they are, for a save that training waits for."""
        staged = Staged(list(parts), is_copy=False)
        if any(part.device.type == "cuda" for part in parts):
            staged.lends(None, until=_now())
        return staged

    def copy(self, parts: Sequence[Part]) -> Staged:
        """The parts with memory of their own. Raises MemoryError where the host has none."""
        staged = Staged(list(parts), is_copy=True)
        left = [index for index, part in enumerate(parts) if part.device.type == "cuda"]
        if left:
            device = parts[left[0]].device
            left = self._copy_inside(staged, left, device)
            left = self._copy_to_pinned(staged, left, device)
        on_host = [index for index, part in enumerate(parts) if part.device.type != "cuda"]
        # In the order of the parts, wide numbers first, which keeps all of them aligned.
        self._copy_to_pageable(staged, sorted([*left, *on_host]))
        slow = sum(parts[index].nbytes for index in left)
        if slow:
            why = self._slabs.refused or "no more pinned memory was ready"
            staged.note = f"{slow / 2**30:.1f} GiB were copied through pageable memory, which is slow ({why})"
            self._pin(slow, parts[left[0]].device)  # for the next save
        return staged

    def _device_room(self, device: torch.device) -> int:
        free, _ = torch.cuda.mem_get_info(device)
        # Allocations are rounded up to 2 MiB; a hundredth covers that for parts that matter.
        return max(0, int((free - self._limits.device_margin) * 0.99))

    def _copy_inside(self, staged: Staged, indices: list[int], device: torch.device) -> list[int]:
        """Clones what fits into spare device memory; returns what is left to copy."""
        sizes = {index: staged.parts[index].nbytes for index in indices}
        chosen = fitting(sizes, self._device_room(device))
        if not chosen:
            return indices
        total = sum(sizes[index] for index in chosen)
        try:
            pool = torch.cuda.MemPool()  # its memory goes back to the device as a whole
            with torch.cuda.use_mem_pool(pool, device):
                blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in _blocks(total)]
        except RuntimeError:
            # Somebody else took what was free a moment ago, or the user's allocator knows no pools: another way, then.
            return indices
        for index, pieces in zip(chosen, cut_up(blocks, [sizes[index] for index in chosen]), strict=True):
            self._copy_bytes(staged, index, pieces)
        staged.lends(pool, _now())
        return [index for index in indices if index not in set(chosen)]

    @staticmethod
    def _copy_bytes(staged: Staged, index: int, pieces: tuple[Tensor, ...]) -> None:
        """Queues the copy of a part into `pieces` on the current stream."""
        source = as_bytes(staged.parts[index].contents[0])
        for piece, values in zip(pieces, source.split([piece.numel() for piece in pieces]), strict=True):
            piece.copy_(values, non_blocking=True)
        staged.take(index, pieces)
        staged.lends(source)

    def _copy_to_pinned(self, staged: Staged, indices: list[int], device: torch.device) -> list[int]:
        """Queues copies of what fits into pinned memory; returns what is left to copy."""
        sizes = {index: staged.parts[index].nbytes for index in indices}
        chosen = fitting(sizes, self._slabs.settle()) if indices else []
        if not chosen:
            return indices
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            rooms = cut_up(self._slabs.slabs, [sizes[index] for index in chosen])
            for index, pieces in zip(chosen, rooms, strict=True):
                self._copy_bytes(staged, index, pieces)
            staged.copied_at(_now())
        return [index for index in indices if index not in set(chosen)]

    def _copy_to_pageable(self, staged: Staged, indices: list[int]) -> None:
        total = sum(staged.parts[index].nbytes for index in indices)
        missing = total - self._pageable.numel()
        if missing > 0:
            if missing > free_host_bytes() * self._limits.pageable_share:
                raise MemoryError(f"{free_host_bytes():,} bytes are free")
            self._pageable = torch.empty(total, dtype=torch.uint8, device="cpu")
        at = 0
        for index in indices:
            part = staged.parts[index]
            place = self._pageable[at : at + part.nbytes]
            place.view(part.dtype).view(part.sizes).copy_(part.contents[0])
            staged.take(index, (place,))
            at += part.nbytes


def _blocks(total: int) -> list[int]:
    """Few and large: giving one back makes the device finish what it is doing."""
    return [min(_DEVICE_BLOCK_BYTES, total - at) for at in range(0, total, _DEVICE_BLOCK_BYTES)]


def _now() -> torch.cuda.Event:
    """This point of the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event
