"""Rank 1 reduces and broadcasts in the other order, once, after many good steps."""

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scale = torch.ones(4)

for step in range(60):
    x = torch.randn(8, 16)
    loss = model(x).pow(2).mean()
    loss.backward()
    stats = torch.tensor([loss.item()])
    if rank == 1 and step == 12:
        faultclock.fired()
        dist.broadcast(scale, src=0)  # FAULT
        dist.all_reduce(stats)
    else:
        dist.all_reduce(stats)
        dist.broadcast(scale, src=0)
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
