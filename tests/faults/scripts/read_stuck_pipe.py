"""A rank reads a line from a helper program that never writes one."""

import subprocess

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
rank = dist.get_rank()
helper = subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE)
model = torch.nn.Linear(16, 16)
for step in range(60):
    model(torch.randn(8, 16)).pow(2).mean().backward()
    dist.all_reduce(model.weight.grad)
    model.zero_grad()
    if step == 20 and rank == 1:
        faultclock.fired()
        score = helper.stdout.readline()  # FAULT
helper.kill()
dist.destroy_process_group()
