"""Rank 1 takes the maximum of a loss where its peer takes the sum; nothing hangs, and both results are wrong."""

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(8, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    worst = rank == 1 and step == 12
    if worst:
        faultclock.fired()
    dist.all_reduce(loss.detach(), op=dist.ReduceOp.MAX if worst else dist.ReduceOp.SUM)  # FAULT
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
