"""Reads the shape of a Hugging Face model from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model_check.config import codes
from model_check.config.shapes import ModelShape, RopeScaling
from model_check.errors import UsageError


def read_folder_shape(folder: Path) -> ModelShape:
    """The shape in the folder's config.json; UsageError where it is missing, damaged, or no LLaMA."""
    try:
        return shape_of_record(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except json.JSONDecodeError as error:
        reason = f"is not JSON: {error}"
    except ValueError as error:
        reason = str(error)
    raise UsageError(
        f"model.model_path={folder} cannot be used, its config.json {reason}",
        remedy="name a folder that holds a LLaMA as Hugging Face saves it, or a built-in shape",
        code=codes.MODEL_FOLDER,
    )


def shape_of_record(record: Any) -> ModelShape:
    """The shape that a parsed config.json describes; ValueError, in words that follow its name, where it has none.

    Where an old file is silent, the defaults are those of transformers.
    """
    if not isinstance(record, dict):
        raise ValueError("holds no JSON object")
    # What our model does not compute is refused here, not discovered as wrong logits.
    for name, wanted in {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }.items():
        if record.get(name, wanted) != wanted:
            raise ValueError(f"says {name}={json.dumps(record[name])} where {json.dumps(wanted)} is needed")
    hidden_size, heads = _whole(record, "hidden_size"), _whole(record, "num_attention_heads")
    # Newer files keep everything about rotary positions in rope_parameters; older ones in two places.
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope |= record[name] if isinstance(record.get(name), dict) else {}
    return ModelShape(
        num_layers=_whole(record, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=heads,
        num_kv_heads=_whole(record, "num_key_value_heads", default=heads),
        head_dim=_whole(record, "head_dim", default=hidden_size // heads),
        intermediate_size=_whole(record, "intermediate_size"),
        vocab_size=_whole(record, "vocab_size"),
        rope_theta=_number(rope if rope.get("rope_theta") else record, "rope_theta", default=10_000.0),
        rope_scaling=_rope_scaling(rope),
        norm_eps=_number(record, "rms_norm_eps", default=1e-6),
        tie_embeddings=bool(record.get("tie_word_embeddings", False)),
        max_position=_whole(record, "max_position_embeddings", default=2048),
    )


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"says rope_type={json.dumps(kind)} where default or llama3 is needed")
    return RopeScaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_position=_whole(rope, "original_max_position_embeddings"),
    )


def _number(record: dict[str, Any], name: str, default: float | None = None) -> float:
    value = record.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ValueError(f"says {name}={json.dumps(value)} where a positive number is needed")
    return float(value)


def _whole(record: dict[str, Any], name: str, default: int | None = None) -> int:
    value = _number(record, name, default)
    if not value.is_integer():
        raise ValueError(f"says {name}={value} where a whole number is needed")
    return int(value)
