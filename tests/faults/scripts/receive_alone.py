"""After thousands of collectives one rank waits for a message while the others go on."""

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(1)
for step in range(20000):
    dist.all_reduce(x)
    x.zero_()
if rank == 1:
    faultclock.fired()
    dist.recv(x, src=2)  # FAULT
for step in range(100):
    dist.all_reduce(x)
dist.destroy_process_group()
