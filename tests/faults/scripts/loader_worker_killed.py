"""A loader worker is killed from outside, as the OOM killer does."""

import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

import faultclock


class Images(Dataset):
    def __init__(self, poisoned):
        self.poisoned = poisoned

    def __len__(self):
        return 320

    def __getitem__(self, i):
        if self.poisoned and i == 100:
            faultclock.fired()
            os.kill(os.getpid(), signal.SIGKILL)  # FAULT-ALSO
        return torch.randn(3, 8, 8), i % 4


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Images(rank == 1), batch_size=8, num_workers=1)
    for images, labels in loader:  # FAULT
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
