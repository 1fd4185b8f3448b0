"""Is a checkpoint what was saved? Reads every byte, block by block, and names the first thing that is not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import BinaryIO

from model_check.checkpoint.manifest import BLOCK_BYTES, Chunk, Manifest, new_hash
from model_check.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint and what its manifest says."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def verify(path: Path, *, part: int = 0, parts: int = 1) -> Checkpoint:
    """Raises CheckpointError for the first damage. With `parts` ranks, each reads the bytes of every parts-th chunk.

    The manifest and the sizes of all files are checked by everyone; they cost nothing.
    """
    manifest = check_sizes(path)
    mine = islice(manifest.chunks(), part, None, parts)
    try:
        for name, chunks in groupby(mine, key=lambda pair: pair[1].file):
            with (path / name).open("rb") as file:
                for tensor, chunk in chunks:
                    _check_chunk(file, tensor, chunk)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror or error})", remedy="resume from another checkpoint", code="MC601"
        ) from error
    return Checkpoint(path, manifest)


def check_sizes(path: Path) -> Manifest:
    """The manifest. Raises CheckpointError if it or a file is missing or has the wrong size. Reads no tensors."""
    manifest = Manifest.read(path)
    for name, size in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing", remedy="resume from another checkpoint", code="MC602")
        found = file.stat().st_size
        if found != size:
            raise CheckpointError(
                f"{file} has {found} bytes instead of {size}", remedy="resume from another checkpoint", code="MC601"
            )
    return manifest


def _check_chunk(file: BinaryIO, tensor: str, chunk: Chunk) -> None:
    digest = new_hash()
    file.seek(chunk.start)
    left = chunk.bytes
    while left:
        block = file.read(min(left, BLOCK_BYTES))
        if not block:
            break
        digest.update(block)
        left -= len(block)
    if left or digest.hexdigest() != chunk.checksum:
        raise CheckpointError(
            f"{file.name} is not what was saved: {tensor} has another checksum",
            remedy="resume from another checkpoint",
            code="MC601",
        )
