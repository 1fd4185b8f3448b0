"""Tokenizing on several processes: the same ids, in order, and nobody left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from model_check.data import load_tokenizer
from model_check.data import parallel_encode as parallel_module
from model_check.data.parallel_encode import TextBatch, encode_batches
from model_check.errors import DataError


@pytest.fixture
def always_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_module, "WORTH_WORKERS_CHARS", 0)


def _batches(texts: list[str]) -> Iterator[TextBatch]:
    for i in range(0, len(texts), 7):
        yield TextBatch([f"{i} {text}" for text in texts[i : i + 7]], i / len(texts))


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def _since(before: set[int]) -> set[int]:
    """The processes that have come since. One that an earlier test has left may end in the meantime."""
    return _children() - before


def test_workers_give_the_ids_of_one_process_in_order(always_workers: None, texts: list[str]) -> None:
    tokenizer = load_tokenizer("builtin")
    before = _children()
    here = list(encode_batches(_batches(texts), tokenizer, workers=1))
    there = list(encode_batches(_batches(texts), tokenizer, workers=2))
    assert [batch.fraction for batch in here] == [batch.fraction for batch in there]
    for one, two in zip(here, there, strict=True):
        np.testing.assert_array_equal(one.documents.ids, two.documents.ids)
        np.testing.assert_array_equal(one.documents.lengths, two.documents.lengths)
    assert not _since(before)


def test_stopping_early_ends_the_workers(always_workers: None, texts: list[str]) -> None:
    before = _children()
    encoded = encode_batches(_batches(texts * 5), load_tokenizer("builtin"), workers=2)
    next(iter(encoded))
    assert len(_since(before)) == 2
    encoded.close()  # type: ignore[attr-defined]
    assert not _since(before)


def test_a_killed_worker_is_an_error_not_a_hang(always_workers: None, texts: list[str]) -> None:
    before = _children()
    encoded = encode_batches(_batches(texts * 20), load_tokenizer("builtin"), workers=2)
    next(iter(encoded))
    for pid in _since(before):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataError, match="ended with code -9"):
        list(encoded)
    assert not _since(before)


def test_little_text_starts_no_process(texts: list[str]) -> None:
    before = _children()
    encoded = iter(encode_batches(_batches(texts), load_tokenizer("builtin"), workers=2))
    next(encoded)
    assert not _since(before)
