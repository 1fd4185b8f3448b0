"""The same in a loader worker: the rank itself only waits in next()."""

import socket

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import faultclock


class Remote(Dataset):
    def __init__(self, broken):
        self.broken = broken

    def __len__(self):
        return 512

    def __getitem__(self, i):
        if self.broken and i == 130:
            left, right = socket.socketpair()
            faultclock.fired()
            left.recv(1)  # FAULT
        return torch.randn(8), i % 2


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Remote(dist.get_rank() == 0), batch_size=8, num_workers=2)
    for x, y in loader:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()
