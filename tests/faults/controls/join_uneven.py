"""Uneven inputs handled by DDP's Join."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
model = DDP(torch.nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
with Join([model]):
    for _ in range(20 + 15 * rank):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
dist.barrier()
print("RESULT", rank, repr(model.module.weight.sum().item()))
dist.destroy_process_group()
