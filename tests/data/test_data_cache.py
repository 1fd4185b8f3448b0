"""The packed cache: any damage is found, and opening costs nothing."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_check.data import PackedCache, check_vocabulary, verify
from model_check.data.packed import (
    BLOCK_BYTES,
    CHECKSUMS,
    DAMAGED,
    DOCUMENTS,
    FORMAT_VERSION,
    MANIFEST,
    TOKENS,
    EncodedDocuments,
    Manifest,
    SplitWriter,
)
from model_check.errors import CacheDamaged, DataError

FILES = (TOKENS, DOCUMENTS, CHECKSUMS, MANIFEST)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two and a half blocks of tokens in documents of 10."""
    folder = tmp_path_factory.mktemp("data") / "train"
    tokens = 10 * (BLOCK_BYTES * 5 // 4 // 10)
    writer = SplitWriter(folder, vocab_size=1000, origin={"dataset": "tést"})
    rng = np.random.default_rng(0)
    writer.append(EncodedDocuments(rng.integers(0, 1000, tokens, dtype=np.uint32), np.full(tokens // 10, 10)))
    writer.finish()
    return folder


@settings(max_examples=200)
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found(split: Path, name: str, place: float, bit: int) -> None:
    path = split / name
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[int(place * len(whole))] ^= 1 << bit
    path.write_bytes(flipped)
    try:
        with pytest.raises(CacheDamaged) as caught:
            verify(PackedCache.open(split))
        assert caught.value.code == "MC901"
    finally:
        path.write_bytes(whole)
        (split / DAMAGED).unlink(missing_ok=True)


@given(name=st.sampled_from(FILES), share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_found_at_opening(split: Path, name: str, share: float) -> None:
    path = split / name
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    try:
        with pytest.raises(CacheDamaged, match=name.replace(".", r"\.")):
            PackedCache.open(split)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found_at_opening(split: Path, name: str) -> None:
    hidden = (split / name).rename(split / "hidden")
    try:
        with pytest.raises(CacheDamaged, match="is missing"):
            PackedCache.open(split)
    finally:
        hidden.rename(split / name)


def test_a_block_is_checked_when_first_read_and_leaves_a_mark(split: Path) -> None:
    path = split / TOKENS
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[BLOCK_BYTES + 7] ^= 1
    path.write_bytes(flipped)
    per_block = BLOCK_BYTES // 2
    try:
        cache = PackedCache.open(split)
        np.testing.assert_array_equal(cache.read(0, per_block), np.frombuffer(whole, np.uint16)[:per_block])
        with pytest.raises(CacheDamaged, match=r"block 1 of tokens\.bin"):
            cache.read(per_block - 1, per_block + 1)
        with pytest.raises(CacheDamaged, match=r"block 1 of tokens\.bin"):
            PackedCache.open(split)
    finally:
        path.write_bytes(whole)
        (split / DAMAGED).unlink(missing_ok=True)


def test_another_format_is_not_read(split: Path) -> None:
    path = split / MANIFEST
    whole = path.read_text(encoding="utf-8")
    content = json.loads(whole)
    del content["checksum"]
    try:
        path.write_text(Manifest(**{**content, "format_version": FORMAT_VERSION + 1}).to_json(), encoding="utf-8")
        with pytest.raises(CacheDamaged, match=f"this version reads {FORMAT_VERSION}"):
            PackedCache.open(split)
    finally:
        path.write_text(whole, encoding="utf-8")


@settings(max_examples=50)
@given(
    batches=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=30), min_size=1, max_size=6),
    vocab_size=st.sampled_from([300, 65_536, 65_537, 150_000]),
)
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]], vocab_size: int
) -> None:
    folder = tmp_path_factory.mktemp("written") / "split"
    writer = SplitWriter(folder, vocab_size, origin={})
    rng = np.random.default_rng(1)
    written = []
    for lengths in batches:
        ids = rng.integers(0, vocab_size, sum(lengths), dtype=np.uint32)
        writer.append(EncodedDocuments(ids, np.array(lengths)))
        written.append(ids)
    writer.finish()
    cache = PackedCache.open(folder)
    verify(cache)
    tokens = np.concatenate(written)
    np.testing.assert_array_equal(cache.read(0, cache.tokens), tokens)
    assert cache.manifest.dtype == ("uint16" if vocab_size <= 65_536 else "uint32")
    assert cache.manifest.max_token_id == tokens.max()
    lengths = np.array([length for batch in batches for length in batch])
    starts = np.cumsum(lengths) - lengths
    first, found = cache.document_starts(0, cache.tokens)
    assert first == 0
    np.testing.assert_array_equal(found, starts)
    middle = cache.tokens // 2
    first, found = cache.document_starts(middle, middle + 1)
    assert starts[first] <= middle
    assert found.tolist() == [starts[first]]


def test_a_billion_tokens_open_in_milliseconds_without_memory(tmp_path: Path) -> None:
    tokens, documents = 1_000_000_000, 2_000_000
    sizes = {TOKENS: 2 * tokens, DOCUMENTS: 8 * documents}
    blocks = sum(-(-size // BLOCK_BYTES) for size in sizes.values())
    for name, size in {**sizes, CHECKSUMS: 8 * blocks}.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    manifest = Manifest(FORMAT_VERSION, "uint16", tokens, documents, 65_535, BLOCK_BYTES, {})
    (tmp_path / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    tracemalloc.start()
    cache = PackedCache.open(tmp_path)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert cache.samples(8192) == 122_070
    assert memory < 1_000_000
    times = []
    for _ in range(5):
        started = time.perf_counter()
        PackedCache.open(tmp_path)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.05


def test_a_token_beyond_the_vocabulary_is_named(split: Path) -> None:
    cache = PackedCache.open(split)
    greatest = cache.manifest.max_token_id
    check_vocabulary(cache, greatest + 1)
    with pytest.raises(DataError, match=f"token id {greatest} and the model has a vocabulary of {greatest}") as caught:
        check_vocabulary(cache, greatest)
    assert caught.value.code == "MC902"
    assert f"at least {greatest + 1}" in caught.value.remedy
