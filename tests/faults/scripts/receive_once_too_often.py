"""The master receives one more message, from any sender, than its workers send."""

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def collect(step):
    buf = torch.empty(2)
    count = world - 1 if step != 7 else world
    for _ in range(count):
        if step == 7:
            faultclock.fired()
        dist.recv(buf)  # FAULT


for step in range(30):
    if rank == 0:
        collect(step)
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    dist.barrier()
dist.destroy_process_group()
