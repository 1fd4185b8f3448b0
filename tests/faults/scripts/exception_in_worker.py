"""An exception in a loader worker, re-raised in the rank."""

import json

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

import faultclock


class JsonLines(Dataset):
    def __init__(self, rank):
        self.lines = ['{"x": [1.0, 2.0, 3.0]}'] * 160
        if rank == 0:
            self.lines[80] = '{"x": [1.0, 2.0'

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        if not self.lines[i].endswith("}"):
            faultclock.fired()
        return torch.tensor(json.loads(self.lines[i])["x"])  # FAULT


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(3, 1))
    for batch in DataLoader(JsonLines(dist.get_rank()), batch_size=4, num_workers=1):
        model(batch).mean().backward()


if __name__ == "__main__":
    main()
