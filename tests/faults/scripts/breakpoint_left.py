"""A forgotten breakpoint() behind a condition that becomes true on one rank."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    x = torch.randn(4, 8) * (1e4 if step == 18 and dist.get_rank() == 1 else 1)
    loss = model(x).pow(2).mean()
    if loss > 1e4:
        faultclock.fired()
        breakpoint()  # FAULT
    loss.backward()  # FAULT-ALSO
    opt.step()
    opt.zero_grad()
