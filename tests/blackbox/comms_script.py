"""Two ranks train under DDP, FSDP and tensor parallelism; rank 0 prints its stats of each as one line of JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from model_check import CommunicationProfiler

STEPS = 3
WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def arranged(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        if kind == "fsdp":
            fully_shard(block, mesh=mesh)
        else:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh) if kind == "fsdp" else model


def train(kind: str) -> dict[str, object]:
    model = arranged(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with CommunicationProfiler(enabled=True) as profiler:
        for _ in range(STEPS):
            model(torch.ones(4, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        stats = profiler.get_stats().to_dict()
    dist.barrier()  # not counted any more
    stats["barriers_after_close"] = profiler.get_stats().collectives["barrier"].count
    return stats


def overlap(rank: int, *, hidden: bool) -> float | None:
    """Rank 0 waits for rank 1, which comes once rank 0 has computed for a while, or without that."""
    computed = Path(f"computed-{hidden}")
    with CommunicationProfiler() as profiler:
        if rank == 0:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            if not hidden:
                computed.touch()
            until = time.process_time() + 0.3
            while hidden and time.process_time() < until:
                sum(range(1000))
            computed.touch()
        else:
            while not computed.exists():
                time.sleep(0.005)
            until = time.monotonic() + (0 if hidden else 0.3)
            while time.monotonic() < until:
                time.sleep(0.005)
            work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()
        dist.barrier()
        return profiler.get_stats().collectives["all_reduce"].overlap


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results: dict[str, object] = {kind: train(kind) for kind in ("ddp", "fsdp", "tp")}
    results["overlap"] = {"hidden": overlap(rank, hidden=True), "exposed": overlap(rank, hidden=False)}
    off = CommunicationProfiler(enabled=False)
    dist.barrier()
    results["off"] = off.get_stats().to_dict()["collectives"]
    if rank == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
