"""The synthetic source: an endless text whose entropy per token is known exactly.

Documents walk a first-order Markov chain over 32 words in four classes (adjective, noun, verb, preposition, and round
again): " old river runs under green house …". After every word the document ends with a fixed probability. The packed
stream of words and end-of-text tokens is then itself a first-order chain over 33 states, so the best possible mean loss
is its entropy rate, Σ π(i)·H(row i), whatever the tokenizer, the context length or the document mask: the token before
a target says all that can be known about it.

Documents are generated as token ids. With a tokenizer that holds every word as one token, as the shipped one does, they
decode to readable text which encodes back to the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from model_check.data.packed import EncodedDocuments
from model_check.data.spec import DataSpec
from model_check.errors import DataError

if TYPE_CHECKING:
    from model_check.data.tokenizer import Tokenizer

GENERATOR_VERSION = 1
"""Part of the cache key: raise it whenever the same seed would give other documents."""

ADJECTIVES = ("old", "small", "quiet", "green", "cold", "bright", "heavy", "young")
NOUNS = ("river", "house", "stone", "garden", "bird", "road", "mountain", "child")
VERBS = ("runs", "stands", "works", "lives", "moves", "sits", "turns", "looks")
PREPOSITIONS = ("under", "near", "over", "above", "behind", "toward", "along", "beyond")
WORDS = ADJECTIVES + NOUNS + VERBS + PREPOSITIONS
SYMBOLS = "abcdefghijklmnopqrstuvwxyzABCDEF"
"""One character a word, for tokenizers of single characters."""

CLASS_SIZE = 8
MEAN_DOCUMENT_WORDS = 63
"""With its end-of-text token a document has 64 tokens on average."""
END_PROBABILITY = 1.0 / MEAN_DOCUMENT_WORDS
DEFAULT_DOCUMENTS = 65_536
DOCUMENTS_PER_BATCH = 8192
_GRAMMAR_SEED = 20_260_101
"""Fixes which successor is the likely one: the language never changes with the seed of the documents."""


def transition_matrix() -> np.ndarray:
    """Row i: the distribution of the next word after word i, given that the document goes on."""
    rng = np.random.default_rng(_GRAMMAR_SEED)
    zipf = 1.0 / np.arange(1, CLASS_SIZE + 1)
    zipf /= zipf.sum()
    matrix = np.zeros((len(WORDS), len(WORDS)))
    for word in range(len(WORDS)):
        next_class = (word // CLASS_SIZE + 1) % (len(WORDS) // CLASS_SIZE)
        matrix[word, next_class * CLASS_SIZE + rng.permutation(CLASS_SIZE)] = zipf
    return matrix


def stream_matrix() -> np.ndarray:
    """The chain of the packed stream: the words, and as the last state the end of text, after which an adjective."""
    size = len(WORDS)
    matrix = np.zeros((size + 1, size + 1))
    matrix[:size, :size] = transition_matrix() * (1.0 - END_PROBABILITY)
    matrix[:size, size] = END_PROBABILITY
    matrix[size, :CLASS_SIZE] = 1.0 / CLASS_SIZE
    return matrix


def stationary_distribution(matrix: np.ndarray) -> np.ndarray:
    """The one π with π·P = π and Σπ = 1."""
    size = len(matrix)
    equations = np.vstack([matrix.T - np.eye(size), np.ones(size)])
    values = np.concatenate([np.zeros(size), [1.0]])
    return np.linalg.lstsq(equations, values, rcond=None)[0]


def entropy_floor(spec: DataSpec) -> float:
    """Nats per predicted token below which no model's expected loss on unseen synthetic text can fall."""
    if spec.dataset != "synthetic":
        raise DataError(
            f"the entropy of {spec.dataset!r} is not known", remedy="only dataset 'synthetic' has a known floor"
        )
    matrix = stream_matrix()
    logs = np.log(matrix, out=np.zeros_like(matrix), where=matrix > 0)
    return float(stationary_distribution(matrix) @ -(matrix * logs).sum(axis=1))


def word_ids(tokenizer: Tokenizer) -> np.ndarray:
    """The token of each word: the word where the tokenizer has it whole, else a letter, else ids spread evenly."""
    for texts in ([f" {word}" for word in WORDS], list(SYMBOLS)):
        encoded = tokenizer.encode_batch(texts)
        ids = [ids[0] for ids in encoded if len(ids) == 1]
        if len(ids) == len(set(ids)) == len(WORDS) and tokenizer.eos_id not in ids:
            return np.array(ids, dtype=np.uint32)
    spread = [id_ for id_ in range(tokenizer.vocab_size) if id_ != tokenizer.eos_id]
    if len(spread) < len(WORDS):
        raise DataError(
            f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} tokens and the synthetic language needs "
            f"{len(WORDS) + 1}",
            remedy="use the builtin tokenizer",
            code="MC907",
        )
    picks = np.linspace(0, len(spread) - 1, len(WORDS)).astype(int)
    return np.array([spread[i] for i in picks], dtype=np.uint32)


def document_count(spec: DataSpec) -> int:
    """As many as asked for; else enough for a thousand samples of a long context."""
    return spec.samples if spec.samples is not None else max(DEFAULT_DOCUMENTS, 16 * spec.context_length)


def synthetic_documents(spec: DataSpec, tokenizer: Tokenizer) -> Iterator[EncodedDocuments]:
    """The documents in batches; batch k depends on (seed, k) alone."""
    ids_of_state = word_ids(tokenizer)
    thresholds = np.cumsum(transition_matrix(), axis=1)
    thresholds[thresholds > 1.0 - 1e-9] = 1.0  # a rounded sum below 1 would let a draw fall through the row
    total = document_count(spec)
    for batch, start in enumerate(range(0, total, DOCUMENTS_PER_BATCH)):
        rng = np.random.Generator(np.random.Philox(key=[np.uint64(spec.seed & (2**64 - 1)), np.uint64(batch)]))
        # A short last batch draws as a full one does, so that more samples only append documents.
        states, lengths = _walk(rng, thresholds, DOCUMENTS_PER_BATCH)
        keep = min(DOCUMENTS_PER_BATCH, total - start)
        lengths = lengths[:keep]
        ends = np.cumsum(lengths + 1)
        ids = np.full(int(ends[-1]), tokenizer.eos_id, dtype=np.uint32)
        is_word = np.ones(len(ids), dtype=bool)
        is_word[ends - 1] = False
        ids[is_word] = ids_of_state[states[: int(lengths.sum())]]
        yield EncodedDocuments(ids=ids, lengths=lengths + 1)


def _walk(rng: np.random.Generator, thresholds: np.ndarray, documents: int) -> tuple[np.ndarray, np.ndarray]:
    """States of all documents one after another, and the words of each; every document takes its steps in parallel."""
    uniform = rng.random(documents)
    lengths = 1 + np.floor(np.log1p(-uniform) / np.log1p(-END_PROBABILITY)).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    states = np.empty(int(lengths.sum()), dtype=np.uint8)
    longest_first = np.argsort(-lengths, kind="stable")
    sorted_lengths = lengths[longest_first]
    current = rng.integers(0, CLASS_SIZE, size=documents)
    for step in range(int(sorted_lengths[0])):
        alive = int(np.searchsorted(-sorted_lengths, -step, side="left"))
        current = current[:alive]
        if step:
            rows = thresholds[current]
            draws = rng.random(alive)
            current = (rows <= draws[:, None]).sum(axis=1)
        states[starts[longest_first[:alive]] + step] = current
    return states, lengths
