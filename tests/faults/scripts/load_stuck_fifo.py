"""Rank 1 loads its weights from a pipe that nobody writes to."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    model(torch.randn(4, 8)).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
    if step == 20 and dist.get_rank() == 1:
        weights = os.path.join(tempfile.mkdtemp(), "weights")
        os.mkfifo(weights)
        faultclock.fired()
        torch.load(weights)  # FAULT
dist.destroy_process_group()
