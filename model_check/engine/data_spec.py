"""From the configuration to what the data room prepares."""

from __future__ import annotations

from model_check.config import Config
from model_check.data import DataSpec


def data_spec(config: Config) -> DataSpec:
    """The data a configuration asks for; the same for the command that prepares it and the ranks that read it."""
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
