"""Samples are piped to a viewer that stopped reading: the pipe fills and write() blocks."""

import subprocess

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
rank = dist.get_rank()
viewer = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
model = torch.nn.Linear(32, 32)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    out = model(torch.randn(8, 32))
    out.pow(2).mean().backward()
    dist.all_reduce(model.weight.grad)
    opt.step()
    opt.zero_grad()
    if step == 15 and rank == 1:
        faultclock.fired()
        viewer.stdin.write(b"x" * 1_000_000)  # FAULT
        viewer.stdin.flush()
viewer.kill()
