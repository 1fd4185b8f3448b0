"""The manifest of a checkpoint: which tensors it holds, where their bytes are, and what those bytes must hash to.

manifest.json         step, world size, files with their sizes, every tensor with its chunks, what resume needs besides
manifest.checksum     the checksum of manifest.json itself, so that a flipped bit in it is found too
rank_00000.bin …      nothing but the bytes of chunks, one after the other: every byte belongs to a checksummed chunk

A chunk is the part of a tensor that one rank wrote; a tensor that is not sharded is one chunk.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from model_check.errors import CheckpointError

MANIFEST = "manifest.json"
CHECKSUM = "manifest.checksum"
FORMAT = 2
BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: where it lies in the tensor, and where its bytes lie on disk."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    bytes: int
    checksum: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `dtype` as torch names it (`float32`), its whole shape, and the chunks that cover it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        return sum(chunk.bytes for chunk in self.chunks)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint promises. `extra` is what JSON can hold: cursor, loss scale, layout, model shape."""

    step: int
    world_size: int
    saved_at: float
    files: dict[str, int]
    tensors: dict[str, TensorEntry]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(self.files.values())

    def write(self, folder: Path) -> None:
        """Both files, on the disk and not only on their way to it."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()
        for name, content in ((MANIFEST, body), (CHECKSUM, hash_of(body).encode() + b"\n")):
            with (folder / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises MC603 where the save was never finished, MC601 where the manifest is not what was written."""
        try:
            body = (folder / MANIFEST).read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{folder} has no readable {MANIFEST}, so its save was never finished",
                remedy="resume from another checkpoint",
                code="MC603",
            ) from error
        _check_own_checksum(folder, body)
        try:
            return cls._parse(json.loads(body))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{folder / MANIFEST} cannot be understood ({type(error).__name__}: {error})",
                remedy="read it with the version that wrote it, or resume from another checkpoint",
                code="MC603",
            ) from error

    @classmethod
    def _parse(cls, value: Any) -> Manifest:
        if not isinstance(value, dict) or value["format"] != FORMAT:
            found = value["format"] if isinstance(value, dict) else "not one of ours"
            raise ValueError(f"its format is {found}, this version reads {FORMAT}")
        tensors = {
            name: TensorEntry(entry["dtype"], tuple(entry["shape"]), tuple(_chunk(c) for c in entry["chunks"]))
            for name, entry in value["tensors"].items()
        }
        parsed = cls(value["step"], value["world_size"], value["saved_at"], value["files"], tensors, value["extra"])
        check_promises(parsed)
        return parsed

    def chunks(self) -> Iterator[tuple[str, Chunk]]:
        """Every chunk with the name of its tensor, in the order of the bytes on disk."""
        pairs = ((name, chunk) for name, entry in self.tensors.items() for chunk in entry.chunks)
        return iter(sorted(pairs, key=lambda pair: (pair[1].file, pair[1].start)))


def check_promises(manifest: Manifest) -> None:
    """Raises ValueError for what no save of ours has written: a checksum says who changed nothing, not who wrote it.

    Files lie in the folder itself; chunks lie in their files and cover their tensors, so no number is made up.
    """
    _whole_numbers("step and world_size", manifest.step, manifest.world_size)
    if not isinstance(manifest.saved_at, (int, float)) or not math.isfinite(manifest.saved_at):
        raise ValueError(f"saved_at is {manifest.saved_at!r}")
    if not isinstance(manifest.extra, dict):
        raise ValueError("extra holds no names")
    for name, size in manifest.files.items():
        if name in ("", ".", "..") or "\0" in name or Path(name).name != name:
            raise ValueError(f"{name!r} is not the name of a file in the folder")
        _whole_numbers(f"the size of {name}", size)
    for name, entry in manifest.tensors.items():
        _check_tensor(name, entry, manifest.files)


def _check_tensor(name: str, entry: TensorEntry, files: Mapping[str, int]) -> None:
    _whole_numbers(f"the shape of {name}", *entry.shape)
    boxes: dict[tuple[int, ...], int] = {}
    for chunk in entry.chunks:
        _whole_numbers(f"a chunk of {name}", *chunk.offsets, *chunk.sizes, chunk.start, chunk.bytes)
        if chunk.start + chunk.bytes > files.get(chunk.file, -1):
            raise ValueError(f"a chunk of {name} is outside of the files that are listed")
        if not len(entry.shape) == len(chunk.offsets) == len(chunk.sizes):
            raise ValueError(f"a chunk of {name} has not the dimensions of {list(entry.shape)}")
        numbers = math.prod(chunk.sizes)
        if numbers == 0:
            continue  # the share of a rank for which nothing was left
        if any(at + size > whole for at, size, whole in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)):
            raise ValueError(f"a chunk of {name} is no part of its shape {list(entry.shape)}")
        if chunk.offsets in boxes:
            raise ValueError(f"{name} has two chunks at {list(chunk.offsets)}")
        boxes[chunk.offsets] = numbers
    if sum(boxes.values()) != math.prod(entry.shape):
        raise ValueError(f"the chunks of {name} do not make up its shape {list(entry.shape)}")


def _whole_numbers(what: str, *values: Any) -> None:
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"{what}: {value!r} is no whole number from 0 on")


def _chunk(value: dict[str, Any]) -> Chunk:
    return Chunk(
        tuple(value["offsets"]),
        tuple(value["sizes"]),
        value["file"],
        value["start"],
        value["bytes"],
        value["checksum"],
    )


def _check_own_checksum(folder: Path, body: bytes) -> None:
    try:
        expected = (folder / CHECKSUM).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder / CHECKSUM} is missing", remedy="resume from another checkpoint", code="MC602"
        ) from error
    if expected != hash_of(body).encode() + b"\n":
        raise CheckpointError(
            f"{folder / MANIFEST} is not what was saved: its checksum differs",
            remedy="resume from another checkpoint",
            code="MC601",
        )


def hash_of(content: bytes | memoryview) -> str:
    """128 bits of XXH3: finds every accidental change, at the speed of memory."""
    return xxhash.xxh3_128_hexdigest(content)


def new_hash() -> Any:
    """The same, for content that comes in blocks."""
    return xxhash.xxh3_128()
