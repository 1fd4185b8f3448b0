"""A retry with an enormous back-off inside the forward pass of one of four ranks."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Retriever(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(8, 8)
        self.calls = 0

    def lookup(self, x):
        self.calls += 1
        if self.calls == 20 and dist.get_rank() == 3:
            faultclock.fired()
            time.sleep(2**20)  # FAULT
        return x

    def forward(self, x):
        return self.proj(self.lookup(x))


dist.init_process_group("gloo")
model = DDP(Retriever())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    model(torch.randn(4, 8)).mean().backward()
    opt.step()
    opt.zero_grad()
