"""Small caches and corpora for the tests of the data room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from model_check.data.packed import EncodedDocuments, PackedCache, SplitWriter

MakeCache = Callable[..., PackedCache]


@pytest.fixture
def make_cache(tmp_path: Path) -> MakeCache:
    """A cache whose token i is i modulo the vocabulary, in documents of the lengths given (or one document)."""
    count = 0

    def make(tokens: int, document_lengths: list[int] | None = None, vocab_size: int = 60_000) -> PackedCache:
        nonlocal count
        count += 1
        folder = tmp_path / f"cache-{count}"
        writer = SplitWriter(folder, vocab_size, origin={})
        lengths = np.array(document_lengths or [tokens], dtype=np.int64)
        assert int(lengths.sum()) == tokens
        writer.append(EncodedDocuments((np.arange(tokens) % vocab_size).astype(np.uint32), lengths))
        writer.finish()
        return PackedCache.open(folder)

    return make


@pytest.fixture
def texts() -> list[str]:
    """Documents with the things that break tokenizers: code, indentation, accents, emoji, long runs of blanks."""
    return [
        "The river runs under the old house. It doesn't stop; it never did!",
        "def f(x):\n    return x + 1\n\tprint( 'hé' )",
        "naïve café — “quoted” 12345 67,89  two  spaces   three",
        "emoji 👩‍👩‍👧 and 漢字かな交じり文 and עברית",
        "trailing blank \nand a tab\tand a form feed\x0cend.",
    ] * 20
