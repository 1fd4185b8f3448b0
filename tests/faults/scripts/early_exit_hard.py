"""os._exit(0) in the middle of training: no handler runs, the code says success."""

import os

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
for step in range(60):
    model(torch.randn(2, 8)).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    model.zero_grad()
    if step == 19 and dist.get_rank() == 2:
        faultclock.fired()
        os._exit(0)  # FAULT
