"""Host memory that a GPU copies into at the speed of the bus, made beforehand, beside training.

Pinning a gigabyte takes a good part of a second and holds up other calls into the driver, so it is done in small slabs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch import Tensor

# A power of two: torch's allocator of pinned memory rounds up to one.
SLAB_BYTES = 1 << 28
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


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
    """Pinned memory in equal slabs, kept from save to save."""

    def __init__(self) -> None:
        self._slabs: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self.refused: str | None = None  # why there is less than was asked for

    def grow(self, total: int, device: torch.device) -> None:
        """Begins to make slabs until there are `total` bytes of them."""
        self.settle()
        self.refused = None
        missing = -(-total // SLAB_BYTES) - len(self._slabs)
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
        return len(self._slabs) * SLAB_BYTES

    def _make(self, count: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            for _ in range(count):
                try:
                    self._slabs.append(torch.empty(SLAB_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True))
                except RuntimeError as error:
                    self.refused = str(error).splitlines()[0]
                    return

    def places(self, sizes: list[int]) -> Iterator[tuple[Tensor, ...]]:
        """Room for one part after the other; a part that reaches over the end of a slab gets several pieces."""
        yield from cut_up(self._slabs, sizes)


def cut_up(slabs: list[Tensor], sizes: list[int]) -> Iterator[tuple[Tensor, ...]]:
    """Consecutive pieces of the slabs, flat, so that each entry has the size asked for."""
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
