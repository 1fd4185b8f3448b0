"""Rank 2 leaves one message of a ring exchange out; its peer waits for it, and everybody for that peer."""

import torch
import torch.distributed as dist

import faultclock


def exchange(rank, world, edges, step):
    left, right = (rank - 1) % world, (rank + 1) % world
    halo = [torch.empty(4), torch.empty(4)]
    messages = [dist.P2POp(dist.isend, edges, right)]
    if rank == 2 and step == 12:
        faultclock.fired()
    else:
        messages.append(dist.P2POp(dist.isend, edges, left))
    messages += [dist.P2POp(dist.irecv, halo[0], left), dist.P2POp(dist.irecv, halo[1], right)]
    for work in dist.batch_isend_irecv(messages):  # FAULT
        work.wait()
    return halo


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(4, 4)
for step in range(40):
    halo = exchange(rank, world, torch.randn(4), step)
    model(halo[0] + halo[1]).sum().backward()
    dist.all_reduce(model.weight.grad)
    model.zero_grad()
dist.destroy_process_group()
