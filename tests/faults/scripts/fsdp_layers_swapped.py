"""FSDP2 over a stack of equal layers; rank 0 visits two of them in another order."""

import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import faultclock


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x):
        for i in self.order:
            x = torch.relu(self.layers[i](x))  # FAULT
        return x.mean()


dist.init_process_group("gloo")
rank = dist.get_rank()
net = Stack()
for layer in net.layers:
    fully_shard(layer)
fully_shard(net)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(6000):
    if rank == 0 and step == 5:
        net.order = [0, 2, 1, 3]
        faultclock.fired()
    net(torch.randn(4, 8)).backward()  # FAULT-ALSO
    opt.step()
    opt.zero_grad()
    time.sleep(0.02)
dist.destroy_process_group()
