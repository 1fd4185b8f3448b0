"""Two of three ranks reduce a metric; the third, left out by a condition on its rank, is already at the barrier."""

import torch
import torch.distributed as dist

import faultclock


def log(loss, rank):
    if rank != 2:
        dist.all_reduce(loss)
    dist.barrier()  # FAULT


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(8, 8)
for step in range(40):
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    dist.all_reduce(model.weight.grad)
    model.zero_grad()
    if step == 12:
        if rank == 0:
            faultclock.fired()
        log(loss.detach(), rank)
dist.destroy_process_group()
