"""How long a training step waits for its batch: `python benchmarks/loader.py [--batches 2000]`.

Two numbers for each shape: milliseconds to produce a batch with nothing else to do, and milliseconds a step of 1 ms (a
busy loop that holds no lock, as a GPU step does) waits for its next batch. The first pass over a fresh cache is
measured, checksums included.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import xxhash
from result_file import result_path, write_result

from model_check.data import BatchLoader, PackedCache
from model_check.data.packed import EncodedDocuments, SplitWriter

STEP_SECONDS = 0.001
SHAPES = ((8, 512), (4, 2048), (2, 8192), (16, 2048))
WORKERS = (0, 1, 2)


def write_cache(folder: Path, tokens: int) -> PackedCache:
    writer = SplitWriter(folder, vocab_size=32_000, origin={})
    rng = np.random.default_rng(0)
    for _ in range(0, tokens, 1 << 20):
        writer.append(EncodedDocuments(rng.integers(0, 32_000, 1 << 20, dtype=np.uint32), np.full(1 << 11, 1 << 9)))
    writer.finish()
    return PackedCache.open(folder)


def step_of_a_millisecond(block: bytes) -> None:
    """Work outside the interpreter lock, as long as a very short step."""
    ends = time.perf_counter() + STEP_SECONDS
    while time.perf_counter() < ends:
        xxhash.xxh3_64_intdigest(block)


def milliseconds(loader: BatchLoader, batches: int, block: bytes | None) -> list[float]:
    waits = []
    for _ in range(batches):
        if block is not None:
            step_of_a_millisecond(block)
        started = time.perf_counter()
        next(loader)
        waits.append(1e3 * (time.perf_counter() - started))
    return waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    options = parser.parse_args()
    block = bytes(1 << 18)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_cache(Path(scratch) / "cache", options.tokens).folder
        for batch, context in SHAPES:
            for workers in WORKERS:
                alone, beside = (
                    _measure(PackedCache.open(folder), batch, context, workers, options.batches, with_step)
                    for with_step in (None, block)
                )
                rows.append(
                    {
                        "batch": batch,
                        "context": context,
                        "num_workers": workers,
                        "ms_per_batch": round(statistics.fmean(alone), 4),
                        "wait_ms_median": round(statistics.median(beside), 4),
                        "wait_ms_p99": round(float(np.quantile(beside, 0.99)), 4),
                    }
                )
                print(
                    f"{batch:3} × {context:5}, {workers} workers: {rows[-1]['ms_per_batch']:.3f} ms a batch; "
                    f"a 1 ms step waits {rows[-1]['wait_ms_median']:.3f} ms (p99 {rows[-1]['wait_ms_p99']:.3f})",
                    flush=True,
                )
    write_result(result_path("loader"), {"results": rows}, ("torch", "numpy"))


def _measure(
    cache: PackedCache, batch: int, context: int, workers: int, batches: int, block: bytes | None
) -> list[float]:
    with BatchLoader(cache, batch, context, num_workers=workers) as loader:
        next(loader)  # starts the threads
        return milliseconds(loader, batches, block)


if __name__ == "__main__":
    main()
