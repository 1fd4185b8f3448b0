"""A rank opens a named pipe for reading, and nobody ever opens the other end."""

import os
import tempfile

import torch
import torch.distributed as dist

import faultclock


def read_schedule(path):
    with open(path) as source:  # FAULT
        return float(source.read())


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(32, 32)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    model(torch.randn(8, 32)).pow(2).mean().backward()
    dist.all_reduce(model.weight.grad)
    opt.step()
    opt.zero_grad()
    if step == 15 and rank == 0:
        pipe = os.path.join(tempfile.mkdtemp(), "schedule.txt")
        os.mkfifo(pipe)
        faultclock.fired()
        opt.param_groups[0]["lr"] = read_schedule(pipe)
dist.destroy_process_group()
