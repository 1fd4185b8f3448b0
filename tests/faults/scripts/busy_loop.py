"""Rank 1 spins until a flag changes that nobody changes."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Prefetcher:
    ready = True

    def wait(self):
        spins = 0
        while not self.ready:  # FAULT
            spins += 1  # FAULT-ALSO
        return spins


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
prefetcher = Prefetcher()
for step in range(100):
    if step == 16 and dist.get_rank() == 1:
        prefetcher.ready = False
        faultclock.fired()
    prefetcher.wait()
    model(torch.randn(4, 8)).mean().backward()
    opt.step()
    opt.zero_grad()
