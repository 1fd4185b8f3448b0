"""A native library in the worker calls exit; the worker is gone without a signal."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import faultclock


class Decoder(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 200

    def __getitem__(self, i):
        if self.rank == 0 and i == 60:
            faultclock.fired()
            os._exit(1)  # FAULT-ALSO
        return torch.randn(5)


dist.init_process_group("gloo")
model = torch.nn.Linear(5, 5)
for batch in DataLoader(Decoder(dist.get_rank()), batch_size=4, num_workers=1, persistent_workers=True):  # FAULT
    loss = model(batch).sum()
    loss.backward()
    dist.all_reduce(model.weight.grad)
    model.zero_grad()
