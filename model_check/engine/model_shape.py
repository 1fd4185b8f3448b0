"""The shape of the model that a configuration trains."""

from __future__ import annotations

from model_check.config import Config, ModelShape, resolve_shape
from model_check.config.resolve import base_shape


def shape_of(config: Config) -> ModelShape:
    """The shape that training would build; the tokenizer is asked only where nothing else says the vocabulary."""
    if config.model.vocab_size is not None or base_shape(config.model.model_path) is not None:
        return resolve_shape(config.model)
    from model_check.data import load_tokenizer

    return resolve_shape(config.model, load_tokenizer(config.data.tokenizer).vocab_size)
