"""How long a step waits for its batch: the loader over a fresh cache of random tokens, checksums included."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model_check.data import BatchLoader, PackedCache
from model_check.data.packed import EncodedDocuments, SplitWriter
from model_check.doctor.jobs import scratch_folder

VOCABULARY = 32_000
_PIECE = 1 << 20
_DOCUMENT = 1 << 9


@dataclass(frozen=True)
class Loading:
    """One number of workers: milliseconds a batch takes with nothing else to do, and what that makes."""

    workers: int
    ms_per_batch: float
    ms_worst: float
    tokens_per_s: float


def measure_loading(
    batch: int, context: int, workers: Sequence[int], batches: int, tokens: int = 8 * _PIECE
) -> Iterator[Loading]:
    with scratch_folder() as folder:
        _write_cache(folder / "cache", max(tokens, (batch + 1) * (context + 1)))
        for count in workers:
            yield _measure(PackedCache.open(folder / "cache"), batch, context, count, batches)


def _write_cache(folder: Path, tokens: int) -> None:
    writer = SplitWriter(folder, vocab_size=VOCABULARY, origin={})
    random = np.random.default_rng(0)
    for _ in range(0, tokens, _PIECE):
        ids = random.integers(0, VOCABULARY, _PIECE, dtype=np.uint32)
        writer.append(EncodedDocuments(ids, np.full(_PIECE // _DOCUMENT, _DOCUMENT)))
    writer.finish()


def _measure(cache: PackedCache, batch: int, context: int, workers: int, batches: int) -> Loading:
    times = []
    with BatchLoader(cache, batch, context, num_workers=workers) as loader:
        next(loader)  # starts the workers
        for _ in range(batches):
            started = time.perf_counter()
            next(loader)
            times.append(time.perf_counter() - started)
    mean = statistics.fmean(times)
    return Loading(workers, 1e3 * mean, 1e3 * max(times), batch * context / mean)
