"""A rank without validation data returns from the validation before its peers reduce their result."""

import torch
import torch.distributed as dist

import faultclock


def validate(model, rank):
    if rank == 0:
        return None
    with torch.no_grad():
        loss = model(torch.randn(16, 8)).pow(2).mean()
    dist.all_reduce(loss)
    return loss


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(8, 2)
for step in range(30):
    model(torch.randn(4, 8)).sum().backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat)  # FAULT
    model.zero_grad()
    if step == 9:
        if rank == 0:
            faultclock.fired()
        validate(model, rank)
dist.destroy_process_group()
