"""Asynchronous reductions; one rank starts one fewer and goes on to the broadcast of the next round."""

import torch
import torch.distributed as dist

import faultclock


def overlapped(model, drop_last):
    handles = []
    params = list(model.parameters())
    if drop_last:
        params.pop()
    for p in params:
        handles.append(dist.all_reduce(p.grad, async_op=True))
    for h in handles:
        h.wait()


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.GELU(), torch.nn.Linear(12, 6))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
lr = torch.tensor([0.1])
for step in range(60):
    dist.broadcast(lr, src=0)  # FAULT
    model(torch.randn(3, 6)).mean().backward()
    drop = rank == 0 and step == 20
    if drop:
        faultclock.fired()
    overlapped(model, drop)
    opt.step()
    opt.zero_grad()
