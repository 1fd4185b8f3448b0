"""Rank 1 has fewer batches: it leaves the loop and waits at the barrier while rank 0 is in backward."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import faultclock

dist.init_process_group("gloo")
rank = dist.get_rank()
data = TensorDataset(torch.randn(400 if rank == 0 else 240, 8))
loader = DataLoader(data, batch_size=8)
model = DDP(torch.nn.Linear(8, 8))
opt = torch.optim.SGD(model.parameters(), lr=0.01)

for (x,) in loader:  # FAULT-ALSO
    model(x).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
if rank == 1:
    faultclock.fired()
dist.barrier()  # FAULT
dist.destroy_process_group()
