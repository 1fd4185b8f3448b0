"""FSDP2: two equal branches; rank 1 runs them in the other order from step 8 on."""

import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import faultclock


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left = torch.nn.Linear(16, 16)
        self.right = torch.nn.Linear(16, 16)
        self.swap = False

    def forward(self, x):
        if self.swap:
            b = self.right(x)  # FAULT
            a = self.left(x)  # FAULT-ALSO
        else:
            a = self.left(x)
            b = self.right(x)
        return (a * b).mean()


dist.init_process_group("gloo")
rank = dist.get_rank()
net = Net()
fully_shard(net.left)
fully_shard(net.right)
fully_shard(net)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(6000):
    net.swap = rank == 1 and step >= 8
    if rank == 1 and step == 8:
        faultclock.fired()
    loss = net(torch.randn(4, 16))  # FAULT-ALSO
    loss.backward()
    opt.step()
    opt.zero_grad()
    time.sleep(0.02)
dist.destroy_process_group()
