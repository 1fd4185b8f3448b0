"""DDP: rank 1 waits for a message from rank 0 instead of running its pass; the others reduce in backward."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(60):
    if rank == 1 and step == 11:
        faultclock.fired()
        flag = torch.zeros(1)
        dist.recv(flag, src=0)  # FAULT
    loss = model(torch.randn(8, 32)).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
