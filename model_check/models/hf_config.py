"""config.json of a Hugging Face LLaMA: to a ModelShape and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from model_check.config.shapes import ModelShape, RopeScaling
from model_check.errors import ModelError
from model_check.models.hub import CONFIG_FILE, pretrained_folder

# What transformers assumes where an old config.json is silent.
_THETA_WHEN_ABSENT = 10_000.0
_EPS_WHEN_ABSENT = 1e-6
_MAX_POSITION_WHEN_ABSENT = 2048


def shape_from_pretrained(source: str | Path) -> ModelShape:
    """The shape of the model in a folder or behind a hub id; fetches its config.json at most."""
    path = pretrained_folder(source, weights=False) / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON", remedy="fetch the model again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object", remedy="fetch the model again")
    return shape_from_config(config, str(path))


def shape_from_config(config: dict[str, Any], where: str = CONFIG_FILE) -> ModelShape:
    """The shape that a parsed config.json describes; raises where it is not a LLaMA we can compute exactly."""
    _refuse_unless_plain_llama(config, where)
    hidden_size = _whole(config, "hidden_size", where)
    num_heads = _whole(config, "num_attention_heads", where)
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    return ModelShape(
        num_layers=_whole(config, "num_hidden_layers", where),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_whole(config, "num_key_value_heads", where, default=num_heads),
        head_dim=_whole(config, "head_dim", where, default=hidden_size // num_heads),
        intermediate_size=_whole(config, "intermediate_size", where),
        vocab_size=_whole(config, "vocab_size", where),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or _THETA_WHEN_ABSENT),
        rope_scaling=_scaling_from(rope, where),
        norm_eps=float(config.get("rms_norm_eps") or _EPS_WHEN_ABSENT),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position=_whole(config, "max_position_embeddings", where, default=_MAX_POSITION_WHEN_ABSENT),
    )


def config_from_shape(
    shape: ModelShape,
    dtype: torch.dtype,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
) -> dict[str, Any]:
    """config.json as transformers 4 and 5 read it."""
    scaling = shape.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        },
        "tie_word_embeddings": shape.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
    }


def _refuse_unless_plain_llama(config: dict[str, Any], where: str) -> None:
    expected = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, value in expected.items():
        found = config.get(key, value)
        if found != value:
            raise ModelError(
                f"{where} has {key}={found!r}, and a LLaMA has {value!r}",
                remedy="name a LLaMA model; other architectures cannot be loaded",
            )


def _scaling_from(rope: dict[str, Any], where: str) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(
            f"{where} has rope_type={kind!r}, and only default and llama3 are computed here",
            remedy="name a model with one of these, or set rope_scaling to null and accept its original context",
        )
    try:
        return RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=int(rope["original_max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{where} has llama3 rope scaling with a missing or wrong value ({error})", remedy="fetch the model again"
        ) from error


def _whole(config: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(f"{where} has {key}={value!r}, not a positive whole number", remedy="fetch the model again")
    return value
