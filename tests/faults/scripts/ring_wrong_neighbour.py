"""A ring of four; rank 2 receives from the wrong neighbour, from the first step on."""

import torch
import torch.distributed as dist

import faultclock


class Ring:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.to = (self.rank + 1) % self.world
        self.source = (self.rank - 1) % self.world
        if self.rank == 2:
            self.source = (self.rank + 1) % self.world

    def shift(self, block):
        out = torch.empty_like(block)
        if self.rank % 2 == 0:
            dist.send(block, self.to)
            dist.recv(out, self.source)  # FAULT
        else:
            dist.recv(out, self.source)
            dist.send(block, self.to)
        return out


dist.init_process_group("gloo")
ring = Ring()
faultclock.fired()
for step in range(20):
    block = ring.shift(torch.randn(4, 4))
    total = block.sum()
    dist.all_reduce(total)
dist.destroy_process_group()
