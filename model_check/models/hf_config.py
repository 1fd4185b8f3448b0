"""config.json of a Hugging Face LLaMA: to a ModelShape and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from model_check.config.folder import shape_of_record
from model_check.config.shapes import ModelShape
from model_check.errors import ModelError
from model_check.models.hub import CONFIG_FILE, pretrained_folder


def shape_from_pretrained(source: str | Path) -> ModelShape:
    """The shape of the model in a folder or behind a hub id; fetches its config.json at most."""
    path = pretrained_folder(source, weights=False) / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON", remedy="fetch the model again") from error
    return shape_from_config(config, str(path))


def shape_from_config(config: Any, where: str = CONFIG_FILE) -> ModelShape:
    """The shape that a parsed config.json describes; raises where it is not a LLaMA we can compute exactly."""
    try:
        return shape_of_record(config)
    except ValueError as error:
        remedy = "name a LLaMA model; where this is one, fetch it again"
        raise ModelError(f"{where} {error}", remedy=remedy) from error


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
