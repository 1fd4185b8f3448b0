"""Hugging Face safetensors in and out, one tensor in memory at a time. Nothing is ever unpickled.

Names are translated, values are not: our rotary embedding pairs channels as theirs does, so no row is permuted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model_check.config.shapes import ModelShape
from model_check.config.shard_index import (
    INDEX_FILE,
    SHARD_BYTES,
    SINGLE_FILE,
    cut_into_files,
    files_in_index,
    index_of,
)
from model_check.errors import ModelError
from model_check.models.distribute import fill
from model_check.models.hf_config import config_from_shape
from model_check.models.hub import CONFIG_FILE, pretrained_folder
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
    folder = pretrained_folder(source, weights=True)
    files = _weight_files(folder)
    parameters = {hugging_face_name(name): parameter for name, parameter in model.named_parameters()}
    _check_fit(parameters, _stored_shapes(files), model, folder)
    for path in files:
        with _open(path) as tensors:
            for name in tensors.keys():  # noqa: SIM118 — a safetensors file is not iterable
                if name in parameters:
                    fill(parameters[name], tensors.get_tensor(name))


def save_pretrained(
    model: Llama,
    folder: str | Path,
    shape: ModelShape | None = None,
    *,
    tokenizer_file: str | Path | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
) -> Path:
    """Write `model` so that `AutoModelForCausalLM.from_pretrained(folder)` computes the same; returns the folder.

    Everything is written beside the folder and moved into place at the end: it is whole, or it is not there.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists and is not an empty folder", remedy="name a new folder")
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        scratch.mkdir(parents=True)
        _write_weights(model, scratch, max_shard_bytes)
        config = config_from_shape(
            shape or model.shape, model.tok_embed.weight.dtype, bos_token_id=bos_token_id, eos_token_id=eos_token_id
        )
        _write_json(scratch / CONFIG_FILE, config)
        if tokenizer_file is not None:
            shutil.copyfile(tokenizer_file, scratch / "tokenizer.json")
            _write_json(scratch / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
        scratch.replace(target)
    except OSError as error:
        raise ModelError(
            f"the model cannot be written to {target}: {error.strerror or error}",
            remedy="name a folder you may write to, on a disk with room",
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    names = [SINGLE_FILE]
    if index.is_file():
        try:
            names = files_in_index(index.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{index} cannot be used, {error}", remedy="fetch the model again") from error
    files = [folder / name for name in names]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {_some(missing)}", remedy="fetch the model again, or convert its weights to safetensors"
        )
    return files


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a whole safetensors file ({error})", remedy="fetch the model again") from error


def _stored_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Names and shapes from the headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with _open(path) as tensors:
            shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
    return shapes


def _check_fit(
    parameters: Mapping[str, Tensor], stored: Mapping[str, tuple[int, ...]], model: Llama, folder: Path
) -> None:
    missing = [name for name in parameters if name not in stored]
    # A pipeline stage takes its own share; what the other stages hold is no surprise in the file.
    known = {hugging_face_name(name) for name, _ in build_meta_model(model.shape).named_parameters()}
    unexpected = [name for name in stored if name not in known and not _may_be_left_out(name, model)]
    misshaped = [
        f"{name} {list(stored[name])} instead of {list(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in stored and stored[name] != tuple(parameter.shape)
    ]
    faults = [
        f"{len(names)} {kind}: {_some(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshaped))
        if names
    ]
    if faults:
        raise ModelError(
            f"the weights in {folder} do not fit the model ({'; '.join(faults)})",
            remedy="take model.* from that folder's config.json (model.model_path), changing num_layers alone",
        )


def _may_be_left_out(name: str, model: Llama) -> bool:
    """Layers beyond ours, frequencies that old checkpoints stored, and a second copy of a tied matrix."""
    layer = _THEIR_LAYER.match(name)
    if layer and int(layer[1]) >= model.shape.num_layers:
        return True
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and model.shape.tie_embeddings)


def _write_weights(model: Llama, folder: Path, max_shard_bytes: int) -> None:
    named = {hugging_face_name(name): parameter.detach() for name, parameter in model.named_parameters()}
    sizes = {name: tensor.nbytes for name, tensor in named.items()}
    files = cut_into_files(sizes, max_shard_bytes)
    for file, names in files.items():
        tensors = {name: named[name].to("cpu").contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = index_of(files, sizes)
    if index is not None:
        _write_json(folder / INDEX_FILE, index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _some(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMES_IN_A_MESSAGE
    return ", ".join(names[:_MOST_NAMES_IN_A_MESSAGE]) + (f" and {rest} more" if rest > 0 else "")
