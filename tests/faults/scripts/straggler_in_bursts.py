"""Steps of 20 ms; rank 1 stops for 150 ms in every fifth step."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def housekeeping():
    time.sleep(0.15)  # FAULT


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(32, 32))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
faultclock.fired()
for step in range(1500):
    time.sleep(0.02)
    loss = model(torch.randn(8, 32)).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    if rank == 1 and step % 5 == 4:
        housekeeping()  # FAULT-ALSO
dist.destroy_process_group()
