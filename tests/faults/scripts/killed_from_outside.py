"""Another process kills one rank with SIGKILL."""

import os
import subprocess

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(32, 32))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(500):
    if step == 30 and dist.get_rank() == 1:
        faultclock.fired()
        subprocess.Popen(["sh", "-c", f"kill -KILL {os.getpid()}"], start_new_session=True).wait()
    model(torch.randn(16, 32)).mean().backward()
    opt.step()
    opt.zero_grad()
