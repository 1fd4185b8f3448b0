"""What to prepare: the frozen description of a data set that every function of this room takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model_check.errors import DataError


@dataclass(frozen=True)
class DataSpec:
    """A source, a tokenizer, and how the tokens are cut into samples.

    dataset              `synthetic`, a path or glob (.txt, .jsonl, .parquet, folder, saved dataset), or a hub name
    tokenizer            `builtin`, `bytes`, a tokenizer.json or the folder that holds one, or a hub id
    samples              documents to take from the source; None: all of it
    context_length       tokens a sample feeds to the model
    cache_dir            where packed caches live
    text_field           the field of a record that holds the text
    subset, split        which part of a hub dataset
    validation_fraction  share of the documents held out, spread evenly over the source
    document_mask        whether the loader reports where documents begin (the cache is the same either way)
    streaming            read a hub dataset while it downloads; `auto`: where it is large or `samples` is set
    seed                 of the synthetic documents; the order of samples has its own seed in the loader
    """

    dataset: str = "synthetic"
    tokenizer: str = "builtin"
    samples: int | None = None
    context_length: int = 512
    cache_dir: str | Path = ".cache/datasets"
    text_field: str = "text"
    subset: str | None = None
    split: str = "train"
    validation_fraction: float = 0.01
    document_mask: bool = False
    streaming: Literal["auto", "on", "off"] = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.context_length < 1:
            raise DataError(f"context_length is {self.context_length}", remedy="give a positive number of tokens")
        if self.samples is not None and self.samples < 1:
            raise DataError(f"samples is {self.samples}", remedy="give a positive number of documents, or none for all")
        if not 0.0 <= self.validation_fraction <= 0.5:
            raise DataError(
                f"validation_fraction is {self.validation_fraction}", remedy="give a share between 0 and 0.5"
            )
