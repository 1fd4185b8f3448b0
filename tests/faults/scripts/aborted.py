"""A native assertion aborts rank 0."""

import torch
import torch.distributed as dist

import faultclock


def check_alignment(offset):
    if offset % 16:
        import os

        faultclock.fired()
        os.abort()  # FAULT


dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
for step in range(40):
    model(torch.randn(2, 8)).sum().backward()
    dist.all_reduce(model.weight.grad)
    model.zero_grad()
    if dist.get_rank() == 0:
        check_alignment(8 if step == 13 else 16)
