"""One rank keeps a record of every sample that it has seen: Python objects, no tensors."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

dist.init_process_group("gloo")
faultclock.fired()
model = DDP(torch.nn.Linear(64, 64))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
seen = {}
for step in range(1200):
    x = torch.randn(64, 64)
    loss = model(x).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    if dist.get_rank() == 1:
        seen.update({(step, i): {"sample": f"{step}-{i}", "loss": [float(i)]} for i in range(800)})  # FAULT
    time.sleep(0.03)
dist.destroy_process_group()
