"""Rank 0 alone collects the sharded optimizer state before its save; collecting takes all ranks."""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def save(opt):
    opt.consolidate_state_dict(to=0)  # FAULT
    torch.save(opt.state_dict(), tempfile.mktemp(suffix=".pt"))


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(20):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
        if step == 10 and dist.get_rank() == 0:
            faultclock.fired()
            save(opt)


if __name__ == "__main__":
    main()
