"""The synthetic language: its entropy is what we say it is, and a small model can learn it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from model_check.data import BatchLoader, DataSpec, entropy_floor, load_tokenizer, prepare
from model_check.data.synthetic import (
    END_PROBABILITY,
    WORDS,
    stationary_distribution,
    stream_matrix,
    synthetic_documents,
    word_ids,
)
from model_check.data.tokenizer import ByteTokenizer, Tokenizer
from model_check.errors import DataError


def _states(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    states = np.full(tokenizer.vocab_size, -1)
    states[word_ids(tokenizer)] = np.arange(len(WORDS))
    states[tokenizer.eos_id] = len(WORDS)
    return states[ids]


def _stream(spec: DataSpec, tokenizer: Tokenizer) -> np.ndarray:
    return np.concatenate([batch.ids for batch in synthetic_documents(spec, tokenizer)])


def test_the_chain_is_a_chain() -> None:
    matrix = stream_matrix()
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0, atol=1e-12)
    stationary = stationary_distribution(matrix)
    np.testing.assert_allclose(stationary @ matrix, stationary, atol=1e-12)
    assert stationary[-1] == pytest.approx(END_PROBABILITY / (1 + END_PROBABILITY))


@pytest.mark.parametrize("name", ["builtin", "bytes"])
def test_the_floor_is_the_loss_of_the_true_model(name: str) -> None:
    tokenizer = load_tokenizer(name)
    spec = DataSpec(samples=20_000, tokenizer=name)
    states = _states(tokenizer, _stream(spec, tokenizer))
    assert states.min() >= 0
    probabilities = stream_matrix()[states[:-1], states[1:]]
    assert probabilities.min() > 0
    assert -np.log(probabilities).mean() == pytest.approx(entropy_floor(spec), rel=0.002)


def test_the_documents_follow_the_stationary_distribution() -> None:
    tokenizer = load_tokenizer("builtin")
    states = _states(tokenizer, _stream(DataSpec(samples=20_000), tokenizer))
    found = np.bincount(states, minlength=len(WORDS) + 1) / len(states)
    np.testing.assert_allclose(found, stationary_distribution(stream_matrix()), atol=0.002)


@pytest.mark.parametrize("name", ["builtin", "bytes"])
def test_documents_are_text_that_encodes_to_the_same_ids(name: str) -> None:
    tokenizer = load_tokenizer(name)
    [batch] = synthetic_documents(DataSpec(samples=200, seed=5), tokenizer)
    ends = np.cumsum(batch.lengths)
    for start, end in zip(ends - batch.lengths, ends, strict=True):
        ids = batch.ids[start:end]
        assert ids[-1] == tokenizer.eos_id
        assert tokenizer.encode(tokenizer.decode(ids[:-1].tolist())) == ids[:-1].tolist()


def test_the_shipped_tokenizer_reads_words() -> None:
    tokenizer = load_tokenizer("builtin")
    assert [tokenizer.decode([id_]) for id_ in word_ids(tokenizer).tolist()] == [f" {word}" for word in WORDS]


class _OddTokenizer(ByteTokenizer):
    """Every text is two tokens, so neither words nor letters are whole."""

    vocab_size = 100
    eos_id = 50

    def encode_batch(self, texts: object) -> list[list[int]]:
        return [[1, 2] for _ in range(len(WORDS))]


def test_any_vocabulary_will_do_if_it_is_large_enough() -> None:
    ids = word_ids(_OddTokenizer())
    assert len(set(ids.tolist())) == len(WORDS)
    assert 50 not in ids
    assert ids.max() == 99
    small = _OddTokenizer()
    small.vocab_size = 20
    with pytest.raises(DataError, match="has 20 tokens"):
        word_ids(small)


def test_the_seed_chooses_documents_and_more_samples_only_append() -> None:
    tokenizer = load_tokenizer("builtin")
    few, many = _stream(DataSpec(samples=100), tokenizer), _stream(DataSpec(samples=9000), tokenizer)
    np.testing.assert_array_equal(few, many[: len(few)])
    other = _stream(DataSpec(samples=100, seed=1), tokenizer)
    assert not np.array_equal(few[:200], other[:200])


def test_other_sources_have_no_floor() -> None:
    with pytest.raises(DataError, match="not known"):
        entropy_floor(DataSpec(dataset="wikitext"))


def test_a_small_model_reaches_the_floor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec = DataSpec(cache_dir=tmp_path, tokenizer="bytes", samples=6000, context_length=128, validation_fraction=0.0)
    cache = prepare(spec).train
    model = torch.nn.Sequential(torch.nn.Embedding(257, 64), torch.nn.RMSNorm(64), torch.nn.Linear(64, 257))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.0)
    losses = []
    with BatchLoader(cache, batch_size=8, context_length=128) as loader:
        for _ in range(150):
            batch = next(loader)
            loss = torch.nn.functional.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[0] > 5.0
    assert np.mean(losses[-30:]) == pytest.approx(entropy_floor(spec), rel=0.03)
