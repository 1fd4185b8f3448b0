"""One rank gives up with its own exit code."""

import sys

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
for step in range(60):
    model(torch.randn(2, 8)).sum().backward()
    dist.all_reduce(model.weight.grad)
    model.zero_grad()
    if step == 21 and dist.get_rank() == 1:
        faultclock.fired()
        sys.exit(7)  # FAULT
