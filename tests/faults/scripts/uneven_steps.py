"""One of three ranks makes fewer steps than the others: it has its own step count, and no loader."""

import torch
import torch.distributed as dist

import faultclock


def train(rank, steps):
    model = torch.nn.Linear(16, 16)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):  # FAULT
        model(torch.randn(4, 16)).pow(2).mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()
    if rank == 2:
        faultclock.fired()
    dist.barrier()


dist.init_process_group("gloo")
train(dist.get_rank(), 18 if dist.get_rank() == 2 else 25)
dist.destroy_process_group()
