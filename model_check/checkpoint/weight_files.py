"""Weights in any form we read: our checkpoints, `.safetensors`, Hugging Face folders, `.pt`. One tensor at a time.

A `.pt` file is opened with torch's weights-only unpickler, never another; its tensors are read from where they lie in
the file, so that opening 32 GB takes no memory.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_check.checkpoint.layout import LATEST, lineages
from model_check.checkpoint.manifest import MANIFEST, Manifest
from model_check.config.shard_index import INDEX_FILE, SINGLE_FILE, files_in_index, is_weights_folder
from model_check.errors import CheckpointError

MODEL_PREFIX = "model."
_WRAPPERS = re.compile(r"(^|\.)(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.)")
_REPLICA = "module."
# What torch's weights-only unpickler says of an object that it would have to call.
_REFUSED_OBJECT = re.compile(r"Unsupported global: GLOBAL (\S+)")
# Under which key old trainers keep the weights in what they save.
_NESTS = ("model", "state_dict", "model_state_dict", "module", "weights")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that has not been read yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Weights:
    """Names and tensors of one model, wherever they lie. `metadata` is what the file says besides (step, shape)."""

    path: Path
    kind: str
    tensors: dict[str, StoredTensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    removed_prefixes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors.values())


def clean_name(name: str) -> str:
    """Without what torch.compile, activation checkpointing and FSDP put into a name."""
    return _WRAPPERS.sub("", name).removeprefix(".")


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Each stored name with what the model calls it: also without the `module.` of DDP, where all of them carry it."""
    cleaned = {name: clean_name(name) for name in names}
    while cleaned and all(name.startswith(_REPLICA) for name in cleaned.values()):
        cleaned = {stored: clean_name(name.removeprefix(_REPLICA)) for stored, name in cleaned.items()}
    return cleaned


def kind_of(path: Path) -> str:
    """`sharded`, `hf`, `safetensors` or `pt`, from what is there."""
    if path.is_dir():
        if (path / MANIFEST).exists():
            return "sharded"
        if is_weights_folder(path):
            return "hf"
    elif path.is_file():
        return "safetensors" if path.suffix == ".safetensors" else "pt"
    inside = f"{path / LATEST}, or another checkpoint in it" if path.is_dir() and lineages(path) else ""
    raise CheckpointError(
        f"{path} holds no weights that we know",
        remedy=f"name {inside or 'a step_* folder, a Hugging Face folder, a .safetensors or a .pt file'}",
        code="MC603",
    )


def open_weights(path: Path) -> Weights:
    """Names, shapes and formats of every tensor; values are read when asked for."""
    kind = kind_of(path)
    tensors, metadata = {"sharded": _sharded, "hf": _folder, "safetensors": _safetensors, "pt": _pt}[kind](path)
    names = clean_names(tensors)
    _check_distinct(path, names)
    changed = [stored for stored, name in names.items() if stored != name]
    prefixes = sorted({prefix for name in changed for prefix in ("module.", "_orig_mod.") if prefix in name})
    return Weights(path, kind, {names[name]: tensor for name, tensor in tensors.items()}, metadata, tuple(prefixes))


def _check_distinct(path: Path, names: Mapping[str, str]) -> None:
    """Two stored names that are one without their prefixes are two tensors, of which one would be lost."""
    seen: dict[str, str] = {}
    for stored, name in names.items():
        if name in seen:
            raise CheckpointError(
                f"{path} holds {seen[name]} and {stored}, which are both {name} without their prefixes",
                remedy="save one of the two state dicts alone",
                code="MC605",
            )
        seen[name] = stored


def _sharded(path: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    from model_check.checkpoint.shards import dtype_of, read_tensor

    manifest = Manifest.read(path)
    tensors = {
        name.removeprefix(MODEL_PREFIX): StoredTensor(
            dtype_of(entry.dtype), entry.shape, partial(read_tensor, path, entry)
        )
        for name, entry in manifest.tensors.items()
        if name.startswith(MODEL_PREFIX)
    }
    return tensors, {"step": manifest.step, **manifest.extra}


def _safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    def read(name: str) -> Tensor:
        """Opens the file anew: a mapping that stays open would keep every page it has touched."""
        with safe_open(path, framework="pt", device="cpu") as file:
            return file.get_tensor(name).clone()

    tensors = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = {key: _maybe_json(value) for key, value in (file.metadata() or {}).items()}
            for name in list(file.keys()):
                part = file.get_slice(name)
                dtype, shape = _SAFETENSORS_DTYPES[part.get_dtype()], tuple(part.get_shape())
                tensors[name] = StoredTensor(dtype, shape, partial(read, name))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error})", remedy="copy or write it again", code="MC601"
        ) from error
    return tensors, metadata


_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in _SAFETENSORS_DTYPES.items()}


def _folder(path: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    index = path / INDEX_FILE
    files = [SINGLE_FILE]
    if index.exists():
        try:
            files = files_in_index(index.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{index} cannot be used, {error}", remedy="copy it again", code="MC601") from error
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing", remedy="copy the folder again", code="MC602")
        tensors.update(_safetensors(file)[0])
    return tensors, {"folder": str(path)}


def _maybe_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _pt(path: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    content, offsets_known = _unpickle(path)
    state, metadata = _state_in(content, path)
    for name, tensor in state.items():
        _check_dense(path, name, tensor)
    return {name: _stored(path, tensor, offsets_known) for name, tensor in state.items()}, metadata


def _unpickle(path: Path) -> tuple[Any, bool]:
    """What the file holds, tensors without their values; a file of torch before 1.6 is read whole."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with path.open("rb") as file, warnings.catch_warnings():
            # A pickle of another program: whether it can be read is said below.
            warnings.filterwarnings("ignore", message="Detected pickle protocol", category=UserWarning)
            if not torch.serialization._is_zipfile(file):
                return torch.load(path, map_location="cpu", weights_only=True), False
            with FakeTensorMode():
                return torch.load(path, map_location="cpu", weights_only=True), True
    except Exception as error:  # the unpickler raises whatever the damage leads it to
        refused = _REFUSED_OBJECT.search(str(error))
        if refused:
            raise CheckpointError(
                f"{path} cannot be read as plain tensors: it holds {refused[1]}",
                remedy="save only tensors, numbers and text into it; other objects are never unpickled",
                code="MC601",
            ) from error
        what = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}" if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as plain tensors ({what})",
            remedy="copy it again if it is a file of torch.save, and else name one",
            code="MC601",
        ) from error


def _state_in(content: Any, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    metadata: dict[str, Any] = {}
    while isinstance(content, Mapping):
        tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
        nest = next((key for key in _NESTS if isinstance(content.get(key), Mapping)), None)
        if nest is None:
            if tensors:
                return _plainly_named(tensors, path), metadata
            break
        metadata.update({k: v for k, v in content.items() if isinstance(v, (int, float, str, dict)) and k != nest})
        content = content[nest]
    raise CheckpointError(
        f"{path} holds no state dict", remedy=f"save the tensors at the top, or under {_NESTS[0]!r}", code="MC603"
    )


def _plainly_named(tensors: Mapping[Any, Tensor], path: Path) -> dict[str, Tensor]:
    """Numbers may be names too, but not beside a text that reads like them."""
    named = {str(name): tensor for name, tensor in tensors.items()}
    if len(named) != len(tensors):
        raise CheckpointError(
            f"{path} names two tensors alike, one by a number and one by a text",
            remedy="save it with names of text alone",
            code="MC603",
        )
    return named


def _check_dense(path: Path, name: str, tensor: Tensor) -> None:
    """The bytes of others are not their values."""
    kinds = {
        "sparse": tensor.layout != torch.strided,
        "a shard of a tensor": hasattr(tensor, "to_local"),
        "a conjugate or negative view": tensor.is_conj() or tensor.is_neg(),
        "quantized": tensor.is_quantized,
    }
    strange = next((kind for kind, applies in kinds.items() if applies), None)
    if strange:
        raise CheckpointError(
            f"{name} in {path} is {strange}, and only dense tensors are read",
            remedy="save a dense copy of it: to_dense(), full_tensor(), resolve_conj(), dequantize()",
            code="MC601",
        )


def _stored(path: Path, tensor: Tensor, offsets_known: bool) -> StoredTensor:
    shape = tuple(tensor.shape)
    if not offsets_known:
        return StoredTensor(tensor.dtype, shape, lambda: tensor)
    begin = offset_in_file(tensor) + int(tensor.storage_offset()) * tensor.dtype.itemsize
    stride = tensor.stride()
    span = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if tensor.numel() else 0

    def read() -> Tensor:
        memory = torch.empty(span * tensor.dtype.itemsize, dtype=torch.uint8, device="cpu")
        with path.open("rb") as file:
            file.seek(begin)
            got = file.readinto(memory.numpy().data) if span else 0
        if got != memory.numel():
            raise CheckpointError(f"{path} ends early", remedy="copy it again", code="MC601")
        return memory.view(tensor.dtype).as_strided(shape, stride)

    return StoredTensor(tensor.dtype, shape, read)


def offset_in_file(hollow: Tensor) -> int:
    """Where the storage of a tensor begins in the file that it was loaded from without its values."""
    offset = hollow.untyped_storage()._checkpoint_offset
    assert offset is not None, "torch did not say where the tensor lies in its file"
    return int(offset)
