"""What the configuration asks for, worked out: the data to prepare and the shape of the model to build."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_check.config import Config, ModelShape, resolve_shape
from model_check.config.resolve import base_shape

if TYPE_CHECKING:
    from model_check.data import DataSpec


def data_spec(config: Config) -> DataSpec:
    """The data a configuration asks for; the same for the command that prepares it and the ranks that read it."""
    from model_check.data import DataSpec

    data = config.data
    return DataSpec(
        dataset=data.dataset,
        tokenizer=data.tokenizer,
        samples=data.samples,
        context_length=config.training.context_length,
        cache_dir=data.cache_dir,
        text_field=data.text_field,
        subset=data.subset,
        split=data.split,
        validation_fraction=data.validation_fraction,
        document_mask=data.document_mask,
        streaming=data.streaming,
        seed=config.system.seed,
    )


def shape_of(config: Config) -> ModelShape:
    """The shape that training would build; the tokenizer is asked only where nothing else says the vocabulary."""
    if config.model.vocab_size is not None or base_shape(config.model.model_path) is not None:
        return resolve_shape(config.model)
    from model_check.data import load_tokenizer

    return resolve_shape(config.model, load_tokenizer(config.data.tokenizer).vocab_size)
