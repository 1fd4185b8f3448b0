"""Both ranks spend nine tenths of each step in the data loader."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

import faultclock


class Slow(Dataset):
    def __len__(self):
        return 8 * 500

    def __getitem__(self, i):
        time.sleep(0.006)  # FAULT
        return torch.randn(16)


dist.init_process_group("gloo")
faultclock.fired()
model = DDP(torch.nn.Linear(16, 16))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for x in DataLoader(Slow(), batch_size=8):  # FAULT-ALSO
    model(x).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
