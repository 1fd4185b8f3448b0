"""Somebody stops one rank (a debugger, a scheduler, Ctrl-Z in the wrong window)."""

import os
import subprocess

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(64, 64))
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(400):
    if step == 30 and dist.get_rank() == 1:
        faultclock.fired()
        subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}"], start_new_session=True)
    for _ in range(20):
        loss = model(torch.randn(32, 64)).pow(2).mean()
        loss.backward()
    opt.step()
    opt.zero_grad()
