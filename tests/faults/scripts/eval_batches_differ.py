"""Validation shards of different length, with the loss reduced after every batch."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import faultclock


def evaluate(model, loader):
    total = torch.zeros(1)
    with torch.no_grad():
        for (x,) in loader:  # FAULT
            loss = model.module(x).pow(2).mean()
            dist.all_reduce(loss)
            total += loss
    return total


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    train = DataLoader(TensorDataset(torch.randn(80, 8)), batch_size=8)
    val = DataLoader(TensorDataset(torch.randn(40 if rank == 0 else 32, 8)), batch_size=8)
    for _ in range(3):
        for (x,) in train:
            model(x).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        if rank == 1:
            faultclock.fired()
        evaluate(model, val)


if __name__ == "__main__":
    main()
