"""Rank 0 waits for the lock of a file that rank 1 never releases."""

import fcntl
import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

dist.init_process_group("gloo")
path = [tempfile.mkstemp()[1]]
dist.broadcast_object_list(path)
mine = os.open(path[0], os.O_RDWR)
if dist.get_rank() == 1:
    fcntl.flock(mine, fcntl.LOCK_EX)
dist.barrier()
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    model(torch.randn(4, 8)).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
    if step == 20 and dist.get_rank() == 0:
        faultclock.fired()
        with open(path[0], "a") as file: fcntl.flock(file, fcntl.LOCK_EX)  # FAULT  # fmt: skip  # noqa: E701
dist.destroy_process_group()
