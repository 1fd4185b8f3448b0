"""Three ranks; the one with the short shard finishes its epoch and simply returns."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

import faultclock


class Shard(IterableDataset):
    def __init__(self, rank):
        self.count = 160 if rank == 2 else 200

    def __iter__(self):
        for _ in range(self.count):
            x = torch.randn(6)
            yield x, (x.sum() > 0).long()


def train():
    model = DDP(torch.nn.Linear(6, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in DataLoader(Shard(dist.get_rank()), batch_size=8):  # FAULT
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()


dist.init_process_group("gloo")
train()
if dist.get_rank() == 2:
    faultclock.fired()  # FAULT-ALSO
