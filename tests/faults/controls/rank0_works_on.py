"""Rank 0 exports and uploads for a while after the process group is gone and its peers have ended."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

PAUSE = float(os.environ.get("CONTROL_PAUSE", "12"))

dist.init_process_group("gloo")
torch.manual_seed(3)
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
rank = dist.get_rank()
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    time.sleep(PAUSE)
print("RESULT", rank, repr(loss.item()))
