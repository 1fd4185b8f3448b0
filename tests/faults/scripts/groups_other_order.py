"""Rank 2 makes the two process groups of the job in the other order."""

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
rank = dist.get_rank()
pairs = [[0, 1], [1, 2]]
if rank == 2:
    faultclock.fired()
    pairs.reverse()
groups = {tuple(pair): dist.new_group(pair) for pair in pairs}  # FAULT
model = torch.nn.Linear(4, 4)
for step in range(40):
    model(torch.randn(2, 4)).sum().backward()
    for pair in sorted(groups):
        if rank in pair:
            dist.all_reduce(model.weight.grad, group=groups[pair])
    model.zero_grad()
dist.destroy_process_group()
