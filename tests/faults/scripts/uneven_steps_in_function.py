"""One of three ranks has fewer batches; the loop calls a function for each step, and a method sums up the losses."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Training:
    def __init__(self, batches):
        self.batches = batches
        self.model = DDP(torch.nn.Linear(8, 8))
        self.opt = torch.optim.AdamW(self.model.parameters())

    def step(self, x):
        self.opt.zero_grad()
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self.opt.step()
        return loss.detach()

    def fit(self):
        total = torch.zeros(1)
        for x in self.batches:  # FAULT
            total += self.step(x)
        return self.averaged(total)

    def averaged(self, total):
        if len(self.batches) < 30:
            faultclock.fired()
        dist.all_reduce(total)
        return total / dist.get_world_size()


dist.init_process_group("gloo")
print(Training([torch.randn(4, 8) for _ in range(28 if dist.get_rank() == 2 else 30)]).fit())
dist.destroy_process_group()
