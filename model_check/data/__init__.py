"""Data: sources, tokenizers, packed cache, resumable loader. May import config.

`prepare(spec)` gives an open cache; `BatchLoader` cuts it into batches. Only the loader needs torch, so it is imported
when first asked for: preparing data, and the processes that tokenize, start without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model_check.data.packed import PackedCache, check_vocabulary, verify
from model_check.data.preparation import PreparedData, Progress, prepare
from model_check.data.spec import DataSpec
from model_check.data.synthetic import entropy_floor
from model_check.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from model_check.data.loader import Batch, BatchLoader, Cursor, check_rank_slices

_NEEDS_TORCH = ("Batch", "BatchLoader", "Cursor", "check_rank_slices")

__all__ = [
    "Batch",
    "BatchLoader",
    "Cursor",
    "DataSpec",
    "PackedCache",
    "PreparedData",
    "Progress",
    "Tokenizer",
    "check_rank_slices",
    "check_vocabulary",
    "entropy_floor",
    "load_tokenizer",
    "prepare",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        from model_check.data import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
