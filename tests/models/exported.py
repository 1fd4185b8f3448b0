"""A model as a Hugging Face folder, for tests that read one: written as `model-check checkpoint convert` writes it."""

from __future__ import annotations

from pathlib import Path

from model_check.checkpoint.weight_files import StoredTensor
from model_check.checkpoint.weight_writers import write_hugging_face
from model_check.config.shard_index import SHARD_BYTES
from model_check.models import Llama, config_from_shape, hugging_face_name


def export(model: Llama, folder: Path, most: int = SHARD_BYTES) -> Path:
    """The folder, its files cut before they pass `most` bytes."""
    tensors = {
        hugging_face_name(name): StoredTensor(p.dtype, tuple(p.shape), p.detach) for name, p in model.named_parameters()
    }
    write_hugging_face(folder, tensors, config_from_shape(model.shape, model.tok_embed.weight.dtype), most)
    return folder
