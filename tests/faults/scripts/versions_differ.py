"""One rank runs another build of torch, as on a host whose environment was not updated."""

import os

import torch

import faultclock

if os.environ["RANK"] == "1":
    torch.__version__ = type(torch.__version__)("2.9.1")

import torch.distributed as dist

faultclock.fired()
dist.init_process_group("gloo")  # FAULT
model = torch.nn.Linear(4, 4)
for _ in range(1500):
    model(torch.randn(2, 4)).sum().backward()
    dist.all_reduce(model.weight.grad)
    model.zero_grad()
dist.destroy_process_group()
