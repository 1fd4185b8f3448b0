"""One rank of a bandwidth measurement: times three collectives at several sizes; rank 0 writes the table.

    model-check run --nproc 2 rank_bandwidth.py FILE cpu|cuda 65536,1048576

The bus bandwidth counts what crosses the slowest link, so that it can be compared between numbers of ranks:
2(n-1)/n of the bytes for an all-reduce, (n-1)/n of the whole for the other two.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any


def seconds_per_call(work: Callable[[], Any], wait: Callable[[], None]) -> float:
    """The median over a few rounds of a few calls, after two that open the connections."""
    for _ in range(2):
        work()
    wait()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(3):
            work()
        wait()
        times.append((time.perf_counter() - started) / 3)
    return sorted(times)[len(times) // 2]


def main(file: Path, kind: str, sizes: list[int]) -> None:
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if kind == "cuda" else "cpu")
    wait = torch.cuda.synchronize if kind == "cuda" else (lambda: None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=60))
    rows = []
    for size in sizes:
        count = max(ranks, size // 4 // ranks * ranks)
        whole = torch.zeros(count, device=device)
        part = torch.zeros(count // ranks, device=device)
        calls = {
            "all-reduce": (partial(dist.all_reduce, whole), 2 * (ranks - 1) / ranks),
            "all-gather": (partial(dist.all_gather_into_tensor, whole, part), (ranks - 1) / ranks),
            "reduce-scatter": (partial(dist.reduce_scatter_tensor, part, whole), (ranks - 1) / ranks),
        }
        for name, (work, share) in calls.items():
            seconds = seconds_per_call(work, wait)
            rate = count * 4 / seconds
            rows.append(
                {
                    "collective": name,
                    "size": count * 4,
                    "seconds": seconds,
                    "algorithm_gb_s": rate / 1e9,
                    "bus_gb_s": rate * share / 1e9,
                }
            )
    if rank == 0:
        file.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3].split(",")])
