"""One rank of the doctor's job: joins, adds up the ranks' numbers, and writes what it got.

model-check run --nproc 2 rank_sums.py FOLDER cpu|cuda
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path


def main(folder: Path, kind: str) -> None:
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if kind == "cuda" else "cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    started = time.perf_counter()
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=60))
    # Every element differs, and so does every rank's share: an order mixed up or a rank missed changes the sum.
    numbers = torch.arange(1 << 16, device=device, dtype=torch.float32) % 251
    mine = numbers * (rank + 1)
    dist.all_reduce(mine)
    right = bool(torch.equal(mine, numbers * (world_size * (world_size + 1) // 2)))
    answer = {"rank": rank, "right": right, "seconds": time.perf_counter() - started, "device": str(device)}
    (folder / f"rank-{rank}.json").write_text(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
