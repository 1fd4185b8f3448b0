"""Gradient accumulation under no_sync, but one rank counts its micro-batches differently."""

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

ACCUMULATE = 4


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(60):
        accumulate = ACCUMULATE
        if dist.get_rank() == 1 and step == 14:
            accumulate = 0
            faultclock.fired()
        for micro in range(ACCUMULATE):
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                model(torch.randn(2, 16)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
        dist.barrier()  # FAULT


if __name__ == "__main__":
    main()
