"""Hugging Face safetensors in, one tensor in memory at a time, and the names of both worlds. Nothing is unpickled.

Names are translated, values are not: our rotary embedding pairs channels as theirs does, so no row is permuted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from model_check.config.shard_index import INDEX_FILE, SINGLE_FILE, tensors_in_index
from model_check.errors import ModelError
from model_check.models.distribute import fill
from model_check.models.hub import pretrained_folder
from model_check.models.initialize import build_meta_model
from model_check.models.llama import Llama

_OUTSIDE_LAYERS = {"tok_embed": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_INSIDE_A_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_OURS_OUTSIDE_LAYERS = {theirs: ours for ours, theirs in _OUTSIDE_LAYERS.items()}
_OURS_INSIDE_A_LAYER = {theirs: ours for ours, theirs in _INSIDE_A_LAYER.items()}
_OUR_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_THEIR_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_MOST_NAMES_IN_A_MESSAGE = 8
# Other formats, such as the integers of a quantized model, are useless without their scales.
_FLOATING = ("F64", "F32", "F16", "BF16")
_POINTER = b"version https://git-lfs"


def hugging_face_name(name: str) -> str:
    """`layers.0.attention.wq.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    layer = _OUR_LAYER.fullmatch(name)
    if layer:
        return f"model.layers.{layer[1]}.{_INSIDE_A_LAYER[layer[2]]}.weight"
    return f"{_OUTSIDE_LAYERS[name.removesuffix('.weight')]}.weight"


def own_name(name: str) -> str:
    """The way back: `model.layers.0.self_attn.q_proj.weight` -> `layers.0.attention.wq.weight`."""
    module = name.removesuffix(".weight")
    layer = _THEIR_LAYER.match(module)
    if layer:
        return f"layers.{layer[1]}.{_OURS_INSIDE_A_LAYER[module[layer.end() :]]}.weight"
    return f"{_OURS_OUTSIDE_LAYERS[module]}.weight"


@torch.no_grad()
def load_pretrained(model: Llama, source: str | Path) -> None:
    """Fill every parameter of `model` from a Hugging Face folder or hub id; a model of fewer layers takes the first.

    Every name and shape is checked before the first value is copied. Values are cast to the model's dtype.
    """
    parameters = {hugging_face_name(name): parameter for name, parameter in model.named_parameters()}
    for path in check_pretrained(model, source):
        with _open(path) as tensors:
            for name in tensors.keys():  # noqa: SIM118 — a safetensors file is not iterable
                if name in parameters:
                    fill(parameters[name], tensors.get_tensor(name))


def check_pretrained(model: Llama, source: str | Path) -> list[Path]:
    """The files that fill `model`, which may be on the meta device. ModelError if they do not fit.

    Reads only headers.
    """
    folder = pretrained_folder(source)
    places = _weight_places(folder)
    files = [folder / name for name in places]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {_some(missing)}", remedy="fetch the model again, or convert its weights to safetensors"
        )
    _check_fit(model, {path.name: _stored(path) for path in files}, places, folder)
    return files


def _weight_places(folder: Path) -> dict[str, list[str]]:
    """Each weights file with the tensors that the index assigns to it; a single file has no index."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return {SINGLE_FILE: []}
    try:
        return tensors_in_index(index.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{index} cannot be used, {why}", remedy="fetch the model again") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        if _is_pointer(path):
            raise ModelError(
                f"{path} is a pointer of Git LFS, not the file itself", remedy="run git lfs pull"
            ) from error
        size = f"{path.stat().st_size:,} bytes" if path.exists() else "gone"
        raise ModelError(
            f"{path} is not a whole safetensors file ({size}; {error})", remedy="fetch the model again"
        ) from error


def _is_pointer(path: Path) -> bool:
    """Whether it is a Git LFS pointer, which a clone without LFS has in place of each large file."""
    try:
        with path.open("rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


@dataclass(frozen=True)
class _Stored:
    """What a header says about a tensor."""

    shape: tuple[int, ...]
    dtype: str


def _stored(path: Path) -> dict[str, _Stored]:
    with _open(path) as tensors:
        parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        return {name: _Stored(tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


def _check_fit(
    model: Llama, found: Mapping[str, Mapping[str, _Stored]], places: Mapping[str, list[str]], folder: Path
) -> None:
    parameters = {hugging_face_name(name): parameter for name, parameter in model.named_parameters()}
    stored = {name: part for parts in found.values() for name, part in parts.items()}
    file_of = {name: file for part in (places, found) for file, names in part.items() for name in names}
    # A pipeline stage takes its own share; what the other stages hold is no surprise in the file.
    known = {hugging_face_name(name) for name, _ in build_meta_model(model.shape).named_parameters()}
    here = {name: parameter for name, parameter in parameters.items() if name in stored}
    kinds = {
        "missing": [name for name in parameters if name not in stored],
        "unexpected": [name for name in stored if name not in known and not _may_be_left_out(name, model)],
        "of another shape": [
            f"{name} {list(stored[name].shape)} instead of {list(parameter.shape)}"
            for name, parameter in here.items()
            if stored[name].shape != tuple(parameter.shape)
        ],
        "no floating-point numbers": [
            f"{name} {stored[name].dtype}" for name in here if stored[name].dtype not in _FLOATING
        ],
    }
    faults = [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds.items() if names]
    if not faults:
        return
    blamed = {file_of[name.split()[0]] for names in kinds.values() for name in names if name.split()[0] in file_of}
    where = folder / blamed.pop() if len(blamed) == 1 else folder
    remedy = "take model.* from that folder's config.json (model.model_path), changing num_layers alone"
    if kinds["missing"]:
        remedy += "; if that is so, fetch the model again"
    elif kinds["no floating-point numbers"]:
        remedy = "name the model that is not quantized"
    raise ModelError(f"the weights in {where} do not fit the model ({'; '.join(faults)})", remedy=remedy)


def _may_be_left_out(name: str, model: Llama) -> bool:
    """Layers beyond ours, frequencies that old checkpoints stored, and a second copy of a tied matrix."""
    layer = _THEIR_LAYER.match(name)
    if layer and int(layer[1]) >= model.shape.num_layers:
        return True
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and model.shape.tie_embeddings)


def _some(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMES_IN_A_MESSAGE
    return ", ".join(names[:_MOST_NAMES_IN_A_MESSAGE]) + (f" and {rest} more" if rest > 0 else "")
