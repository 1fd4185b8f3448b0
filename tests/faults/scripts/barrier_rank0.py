"""The barrier after the save was indented into `if rank == 0`."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Linear(16, 16))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
folder = tempfile.mkdtemp()

for step in range(1, 101):
    model(torch.randn(4, 16)).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
    if step % 20 == 0 and rank == 0:
        torch.save(model.module.state_dict(), os.path.join(folder, f"{step}.pt"))
        faultclock.fired()
        dist.barrier()  # FAULT
dist.destroy_process_group()
