"""Two same-shape reductions in swapped order on one rank: nothing hangs, the numbers are wrong."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import faultclock

dist.init_process_group("gloo")
rank = dist.get_rank()
net = DistributedDataParallel(torch.nn.Linear(16, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.05)

for step in range(2000):
    x, y = torch.randn(16, 16), torch.randint(0, 2, (16,))
    out = net(x)
    loss = torch.nn.functional.cross_entropy(out, y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    loss_sum = loss.detach().clone()
    correct = (out.argmax(1) == y).float().mean()
    if rank == 1 and step >= 10:
        if step == 10:
            faultclock.fired()
        dist.all_reduce(correct)  # FAULT
        dist.all_reduce(loss_sum)  # FAULT-ALSO
    else:
        dist.all_reduce(loss_sum)
        dist.all_reduce(correct)
    time.sleep(0.01)
dist.destroy_process_group()
