"""What one rank holds of a save, and how its bytes reach the disk: several threads, one file, a checksum a part."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from model_check.checkpoint.manifest import BLOCK_BYTES, Chunk, new_hash

# Values on a device come through two such buffers for each thread: one is filled while the other is written.
_RELAY_BYTES = 1 << 26
# Below this, starting threads costs more than they save.
_SMALL_FILE = 1 << 26


@dataclass(frozen=True)
class Part:
    """What one rank writes of one tensor: the bytes of `contents`, one after the other."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    contents: tuple[Tensor, ...]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], data: Tensor) -> Part:
        return cls(name, shape, offsets, tuple(data.shape), data.dtype, (data,))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.contents)

    @property
    def device(self) -> torch.device:
        return self.contents[0].device


@dataclass(frozen=True)
class Written:
    """A part that lies on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk: Chunk


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes as a flat uint8 tensor; no copy where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def write_parts(path: Path, parts: Sequence[Part], *, threads: int = 1) -> list[Written]:
    """Writes one rank's file, hashing on the way; returns after the bytes are on the disk."""
    ends = list(accumulate(part.nbytes for part in parts))
    written: list[Written | None] = [None] * len(parts)
    with path.open("xb") as file:

        def work(take: Iterator[int]) -> None:
            relay = _Relay()
            for index in take:
                part = parts[index]
                start = ends[index] - part.nbytes
                checksum = _write_part(file.fileno(), start, part, relay)
                chunk = Chunk(part.offsets, part.sizes, path.name, start, part.nbytes, checksum)
                written[index] = Written(part.name, dtype_name(part.dtype), part.shape, chunk)

        _share_out(len(parts), work, threads if ends and ends[-1] >= _SMALL_FILE else 1)
        os.fsync(file.fileno())
    return [entry for entry in written if entry is not None]


def _write_part(handle: int, at: int, part: Part, relay: _Relay) -> str:
    digest = new_hash()
    for tensor in part.contents:
        for block in relay.blocks(tensor):
            for begin in range(0, len(block), BLOCK_BYTES):
                piece = block[begin : begin + BLOCK_BYTES]
                digest.update(piece)
                while len(piece):
                    count = os.pwrite(handle, piece, at)
                    piece, at = piece[count:], at + count
    return digest.hexdigest()


def _share_out(count: int, work: Callable[[Iterator[int]], None], threads: int) -> None:
    """Calls `work` in several threads, each index goes to one of them; raises what the first of them raised.

    Daemons: a rank that fails must end at once, whatever its unfinished save is waiting for.
    """
    lock = threading.Lock()
    left = iter(range(count))
    failures: list[BaseException] = []

    def take() -> Iterator[int]:
        while True:
            with lock:
                index = None if failures else next(left, None)
            if index is None:
                return
            yield index

    def run() -> None:
        try:
            work(take())
        except BaseException as failure:  # handed to the caller below, whatever it is
            with lock:
                failures.append(failure)

    helpers = [threading.Thread(target=run, name=f"checkpoint-{n}", daemon=True) for n in range(1, threads)]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


class _Relay:
    """Bytes in host memory as they are; bytes on a GPU through two pinned buffers, on a stream of its own."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._buffers: list[Tensor] = []

    def blocks(self, tensor: Tensor) -> Iterator[memoryview]:
        """The tensor's bytes; each block is valid until the next one is asked for."""
        if tensor.device.type == "cpu":
            yield as_bytes(tensor).numpy().data
            return
        if self._stream is None:
            with torch.cuda.device(tensor.device):
                self._stream = torch.cuda.Stream()
                self._buffers = [
                    torch.empty(_RELAY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)
                ]
        with torch.cuda.stream(self._stream):
            flat = as_bytes(tensor)
        under_way: tuple[Tensor, torch.cuda.Event] | None = None
        for number, piece in enumerate(flat.split(_RELAY_BYTES)):
            place = self._buffers[number % 2][: piece.numel()]
            with torch.cuda.stream(self._stream):
                place.copy_(piece, non_blocking=True)
                arrived = torch.cuda.Event()
                arrived.record()
            if under_way is not None:
                yield _once_there(*under_way)
            under_way = place, arrived
        if under_way is not None:
            yield _once_there(*under_way)


def _once_there(place: Tensor, arrived: torch.cuda.Event) -> memoryview:
    arrived.synchronize()
    return place.numpy().data
