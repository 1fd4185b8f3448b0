"""Losses are kept with their graphs: the resident memory of one rank climbs every step."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

dist.init_process_group("gloo")
faultclock.fired()
model = DDP(torch.nn.Linear(64, 64))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
history = []
for step in range(1200):
    x = torch.randn(2048, 64)
    loss = model(x).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    if dist.get_rank() == 0:
        history.append((loss, x))  # FAULT
    time.sleep(0.03)
dist.destroy_process_group()
