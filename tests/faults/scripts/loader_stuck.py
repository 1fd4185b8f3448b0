"""A sample whose file never arrives: the read blocks in the main process."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

import faultclock


class Shards(Dataset):
    def __init__(self, rank):
        self.rank = rank
        self.pipe = os.path.join(tempfile.mkdtemp(), "shard-17.bin")
        os.mkfifo(self.pipe)

    def __len__(self):
        return 400

    def __getitem__(self, index):
        if self.rank == 1 and index == 64:
            faultclock.fired()
            with open(self.pipe, "rb") as shard:  # FAULT
                shard.read(8)
        return torch.full((8,), float(index))


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in DataLoader(Shards(dist.get_rank()), batch_size=8):
        model(batch).mean().backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
