"""The storage behind torch.distributed.checkpoint: one plain file of bytes a rank, no pickles.

DCP decides who writes which part of which tensor, and who reads it back under another layout. Here a save is only
planned: `staging` copies the parts while training waits, `parts` writes them later.
"""

from __future__ import annotations

import math
import os
import warnings
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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
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


def collect_parts(state: dict[str, Any], group: Any) -> list[Part]:
    """What this rank has to write of `state` (name to tensor or DTensor): collective over `group`, no disk."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    collector = PartCollector()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        # DCP warns of working without a process group, which is what is meant here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        dcp.save(state, storage_writer=collector, planner=planner, process_group=group, no_dist=group is None)
    return collector.parts


def load_into(folder: Path, manifest: Manifest, state: dict[str, Any]) -> None:
    """Fills the tensors of `state` in place, whatever layout they were saved under; only the bytes needed are read.

    DCP's planner says which part of which chunk goes where. Every rank reads for itself: nothing is collective.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(state, _as_metadata(manifest), is_coordinator=True)
    maps: dict[str, Tensor] = {}
    for item in planner.create_local_plan().items:
        stored = _mapped(folder, manifest, maps, item.storage_index.fqn, tuple(item.storage_index.offset or ()))
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            stored = stored.narrow(dimension, start, length)
        planner.resolve_tensor(item).detach().copy_(stored)


def _as_metadata(manifest: Manifest) -> Metadata:
    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=dtype_of(entry.dtype)),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
            )
            for name, entry in manifest.tensors.items()
        }
    )


def _mapped(folder: Path, manifest: Manifest, maps: dict[str, Tensor], name: str, offsets: tuple[int, ...]) -> Tensor:
    """A chunk in a mapping of its file; `maps` keeps the mappings made so far."""
    entry = manifest.tensors[name]
    chunk = next((c for c in entry.chunks if c.offsets == offsets), entry.chunks[0])
    if not chunk.bytes:
        return torch.empty(chunk.sizes, dtype=dtype_of(entry.dtype), device="cpu")
    if chunk.file not in maps:
        size = manifest.files[chunk.file]
        maps[chunk.file] = torch.from_file(str(folder / chunk.file), shared=False, size=size, dtype=torch.uint8)
    flat = maps[chunk.file][chunk.start : chunk.start + chunk.bytes]
    return _as_chunk(flat, entry, chunk)
