"""DDP over four ranks; ranks 0 and 1 wait at a barrier for the group of 0, 1 and 2, which rank 2 does not enter."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

dist.init_process_group("gloo")
rank = dist.get_rank()
loggers = dist.new_group([0, 1, 2])
model = DDP(torch.nn.Linear(16, 16))
opt = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(60):
    model(torch.randn(4, 16)).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
    if step == 14 and rank in (0, 1):
        faultclock.fired()
        dist.barrier(group=loggers)  # FAULT
dist.destroy_process_group()
