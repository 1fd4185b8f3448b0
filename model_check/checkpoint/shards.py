"""The storage behind torch.distributed.checkpoint: one plain file of bytes a rank, no pickles.

DCP decides who writes which part of which tensor, and who reads it back under another layout. Here a save is only
planned: `staging` copies the parts while training waits, `parts` writes them later.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from model_check.checkpoint.manifest import Chunk, Manifest, TensorEntry
from model_check.checkpoint.parts import Part
from model_check.errors import CheckpointError


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"torch has no number format {name!r}", remedy="read it with a newer torch", code="MC601")
    return dtype


class PartCollector(StorageWriter):
    """Takes from DCP's plan what this rank has to write, and writes nothing."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.parts = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: no storage is touched here."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts = [self._part(item, planner) for item in plan.items]
        # Wide numbers first: every chunk then begins at a multiple of its number's size without any padding.
        self.parts = sorted(parts, key=lambda part: (-part.dtype.itemsize, part.name, part.offsets))
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    @staticmethod
    def _part(item: WriteItem, planner: SavePlanner) -> Part:
        data = planner.resolve_data(item)
        assert isinstance(data, Tensor) and item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
        chunk = item.tensor_data.chunk
        return Part.of(item.index.fqn, tuple(item.tensor_data.size), tuple(chunk.offsets), data.detach())

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The manifest is made from what was really written, not from the plan."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _as_chunk(flat: Tensor, entry: TensorEntry, chunk: Chunk) -> Tensor:
    """The bytes of a chunk as its numbers."""
    dtype = dtype_of(entry.dtype)
    if math.prod(chunk.sizes) * dtype.itemsize != chunk.bytes:
        raise CheckpointError(
            f"{chunk.file} has {chunk.bytes} bytes for {list(chunk.sizes)} numbers of {entry.dtype}",
            remedy="resume from another checkpoint",
            code="MC601",
        )
    return flat.view(dtype).view(chunk.sizes)


def read_chunk(folder: Path, entry: TensorEntry, chunk: Chunk) -> Tensor:
    """The values of one chunk, in memory of their own."""
    memory = torch.empty(chunk.bytes, dtype=torch.uint8, device="cpu")
    if chunk.bytes:
        with (folder / chunk.file).open("rb") as file:
            file.seek(chunk.start)
            got = file.readinto(memory.numpy().data)
        if got != chunk.bytes:
            raise CheckpointError(
                f"{folder / chunk.file} ends early", remedy="resume from another checkpoint", code="MC601"
            )
    return _as_chunk(memory, entry, chunk)


def read_tensor(folder: Path, entry: TensorEntry) -> Tensor:
    """A whole tensor, put together from its chunks."""
    if len(entry.chunks) == 1:
        return read_chunk(folder, entry, entry.chunks[0])
    whole = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="cpu")
    for chunk in entry.chunks:
        box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box] = read_chunk(folder, entry, chunk)
    return whole


class ShardReader(StorageReader):
    """Gives DCP the parts it asks for, whatever layout they were saved under; only the bytes needed are read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._maps: dict[str, Tensor] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._maps = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=dtype_of(entry.dtype)),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
                )
                for name, entry in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The manifest has been read already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            stored = self._mapped(item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        self._maps = {}
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _mapped(self, name: str, offsets: tuple[int, ...]) -> Tensor:
        entry = self._manifest.tensors[name]
        chunk = next((c for c in entry.chunks if c.offsets == offsets), entry.chunks[0])
        if not chunk.bytes:
            return torch.empty(chunk.sizes, dtype=dtype_of(entry.dtype), device="cpu")
        if chunk.file not in self._maps:
            size = self._manifest.files[chunk.file]
            path = str(self._folder / chunk.file)
            self._maps[chunk.file] = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
        flat = self._maps[chunk.file][chunk.start : chunk.start + chunk.bytes]
        return _as_chunk(flat, entry, chunk)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def collect_parts(state: dict[str, Any], group: Any) -> list[Part]:
    """What this rank has to write of `state` (name to tensor or DTensor): collective over `group`, no disk."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    collector = PartCollector()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _quiet():
        dcp.save(state, storage_writer=collector, planner=planner, process_group=group, no_dist=group is None)
    return collector.parts


def load_into(folder: Path, manifest: Manifest, state: dict[str, Any]) -> None:
    """Fills the tensors of `state` in place. Every rank reads for itself: nothing is collective."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _quiet():
        dcp.load(state, storage_reader=ShardReader(folder, manifest), planner=planner, no_dist=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns of working without a process group, which is what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
