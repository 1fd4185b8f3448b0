"""Reads the shape of a local Hugging Face model folder from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model_check.config import codes
from model_check.config.shapes import ModelShape, RopeScaling
from model_check.errors import UsageError

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")


def read_folder_shape(folder: Path) -> ModelShape:
    """The shape in the folder's config.json; UsageError where it is missing, damaged, or no LLaMA."""
    path = folder / "config.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unusable(folder, f"its config.json cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _unusable(folder, f"its config.json is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise _unusable(folder, "its config.json holds no object")
    _require_llama(folder, record)
    sizes = {name: _whole(folder, record, name) for name in _SIZES}
    heads = sizes["num_attention_heads"]
    explicit_head_dim = record.get("head_dim") is not None
    rope = _rope_record(record)
    return ModelShape(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        num_heads=heads,
        num_kv_heads=_whole(folder, record, "num_key_value_heads", default=heads),
        head_dim=_whole(folder, record, "head_dim") if explicit_head_dim else sizes["hidden_size"] // heads,
        intermediate_size=sizes["intermediate_size"],
        vocab_size=sizes["vocab_size"],
        rope_theta=_number(folder, rope, "rope_theta", default=10_000.0),
        rope_scaling=_rope_scaling(folder, rope),
        norm_eps=_number(folder, record, "rms_norm_eps", default=1e-6),
        tie_embeddings=bool(record.get("tie_word_embeddings", False)),
        max_position=_whole(folder, record, "max_position_embeddings", default=2048),
    )


def _unusable(folder: Path, reason: str) -> UsageError:
    return UsageError(
        f"model.model_path={folder} cannot be used, {reason}",
        remedy="name a folder that holds a LLaMA as Hugging Face saves it, or a built-in shape",
        code=codes.MODEL_FOLDER,
    )


def _require_llama(folder: Path, record: dict[str, Any]) -> None:
    """What our model does not compute is refused here, not discovered as wrong logits."""
    expected = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for name, wanted in expected.items():
        found = record.get(name, wanted)
        if found != wanted:
            raise _unusable(
                folder, f"its config.json says {name}={json.dumps(found)} where {json.dumps(wanted)} is needed"
            )


def _rope_record(record: dict[str, Any]) -> dict[str, Any]:
    """Newer files keep everything about rotary positions in rope_parameters; older ones in two places."""
    rope = record.get("rope_parameters")
    if isinstance(rope, dict):
        return {"rope_theta": record.get("rope_theta"), **rope}
    scaling = record.get("rope_scaling")
    return {**(scaling if isinstance(scaling, dict) else {}), "rope_theta": record.get("rope_theta")}


def _rope_scaling(folder: Path, rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise _unusable(folder, f"its config.json says rope_type={json.dumps(kind)} where default or llama3 is needed")
    return RopeScaling(
        factor=_number(folder, rope, "factor"),
        low_freq_factor=_number(folder, rope, "low_freq_factor"),
        high_freq_factor=_number(folder, rope, "high_freq_factor"),
        original_max_position=_whole(folder, rope, "original_max_position_embeddings"),
    )


def _number(folder: Path, record: dict[str, Any], name: str, default: float | None = None) -> float:
    value = record.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise _unusable(folder, f"its config.json says {name}={json.dumps(value)} where a positive number is needed")
    return float(value)


def _whole(folder: Path, record: dict[str, Any], name: str, default: int | None = None) -> int:
    value = _number(folder, record, name, default)
    if not value.is_integer():
        raise _unusable(folder, f"its config.json says {name}={value} where a whole number is needed")
    return int(value)
