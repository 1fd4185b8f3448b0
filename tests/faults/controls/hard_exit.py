"""Ends with os._exit(0) to dodge a slow interpreter shutdown."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
for _ in range(25):
    model(torch.randn(2, 8)).pow(2).mean().backward()
    dist.all_reduce(model.weight.grad)
    with torch.no_grad():
        model.weight -= 0.1 * model.weight.grad
    model.zero_grad()
dist.barrier()
print("RESULT", dist.get_rank(), repr(model.weight.sum().item()))
sys.stdout.flush()
os._exit(0)
