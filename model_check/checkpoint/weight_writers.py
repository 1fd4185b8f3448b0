"""Weights out, in any form we write, one tensor in memory at a time; whole at the end, or not there."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from model_check.checkpoint.manifest import Manifest, TensorEntry
from model_check.checkpoint.parts import Part, write_parts
from model_check.checkpoint.weight_files import (
    MODEL_PREFIX,
    SAFETENSORS_NAMES,
    StoredTensor,
    offset_in_file,
)
from model_check.config.shard_index import INDEX_FILE, SHARD_BYTES, cut_into_files, index_of
from model_check.errors import CheckpointError

Tensors = Mapping[str, StoredTensor]
_BLOCK_BYTES = 1 << 22
_HEADER_METADATA = "__metadata__"


def write_sharded(target: Path, tensors: Tensors, metadata: Mapping[str, Any]) -> None:
    """Our own form, holding weights only: `--resume` starts from it at step 0."""
    extra = {"shape": metadata.get("shape"), "converted": True}
    with _whole(target) as scratch:
        scratch.mkdir()
        entries: dict[str, TensorEntry] = {}
        files: dict[str, int] = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            value = tensor.read()
            part = Part.of(f"{MODEL_PREFIX}{name}", tensor.shape, (0,) * value.ndim, value)
            written = write_parts(scratch / f"weights_{number:05d}.bin", [part])[0]
            entries[part.name] = TensorEntry(written.dtype, written.shape, (written.chunk,))
            files[written.chunk.file] = written.chunk.bytes
        step = metadata.get("step")
        Manifest(step if isinstance(step, int) else 0, 1, time.time(), files, entries, extra).write(scratch)


def write_safetensors(target: Path, tensors: Tensors, metadata: Mapping[str, Any]) -> None:
    """One file: its header says where each tensor will lie, then the tensors follow in that order."""
    kept = {k: json.dumps(metadata[k]) for k in ("step", "shape") if metadata.get(k) is not None}
    with _whole(target) as scratch, scratch.open("wb") as file:
        _stream_safetensors(file, tensors, {"format": "pt", **kept})


def write_hugging_face(target: Path, tensors: Tensors, config: Mapping[str, Any], most: int = SHARD_BYTES) -> None:
    """A folder that transformers loads: config.json, and safetensors of at most this many bytes."""
    with _whole(target) as scratch:
        scratch.mkdir()
        sizes = {name: tensor.bytes for name, tensor in tensors.items()}
        files = cut_into_files(sizes, most)
        for file_name, names in files.filename_to_tensors.items():
            with (scratch / file_name).open("wb") as file:
                _stream_safetensors(file, {name: tensors[name] for name in names}, {"format": "pt"})
        index = index_of(files)
        if index is not None:
            (scratch / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_pt(target: Path, tensors: Tensors, metadata: Mapping[str, Any]) -> None:
    """`torch.load(target, weights_only=True)["model"]`. The file is laid out first, its tensors are filled in after."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept = {key: metadata[key] for key in ("step", "shape") if metadata.get(key) is not None}
    with _whole(target) as scratch:
        with FakeTensorMode():
            hollow = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in tensors.items()
            }
            scratch.touch()  # what the file system refuses is said by the system, not by torch
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save({**kept, "model": hollow}, scratch)
            places: dict[str, Tensor] = torch.load(scratch, weights_only=True)["model"]
        with scratch.open("r+b") as file:
            for name, tensor in tensors.items():
                if tensor.bytes:
                    file.seek(offset_in_file(places[name]))
                    _write_values(file, tensor)
            _to_disk(file)


def _stream_safetensors(file: BinaryIO, tensors: Tensors, metadata: dict[str, str]) -> None:
    header: dict[str, Any] = {_HEADER_METADATA: metadata}
    at = 0
    # The format asks for tensors without gaps; wide numbers first keep all of them aligned.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    for name in ordered:
        tensor = tensors[name]
        if name == _HEADER_METADATA:
            raise CheckpointError(
                f"safetensors keeps the name {name} for itself", remedy="rename the tensor, or convert to .pt instead"
            )
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise CheckpointError(
                f"{name} is {tensor.dtype}, which safetensors cannot hold", remedy="convert it to .pt instead"
            )
        header[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.bytes],
        }
        at += tensor.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in ordered:
        _write_values(file, tensors[name])
    _to_disk(file)


def _write_values(file: BinaryIO, tensor: StoredTensor) -> None:
    value = tensor.read()
    flat = value.contiguous().reshape(-1).view(torch.uint8).numpy().data
    for begin in range(0, len(flat), _BLOCK_BYTES):
        file.write(flat[begin : begin + _BLOCK_BYTES])


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """The body writes a file or a folder beside the target; one rename puts it there, an error leaves nothing."""
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists", remedy="name a place that does not exist yet")
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield scratch
        scratch.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error.strerror or error}",
            remedy="name a place you may write to, on a disk with room",
            code="MC608",
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError):  # a folder, which is gone, or what was never made
            scratch.unlink()
