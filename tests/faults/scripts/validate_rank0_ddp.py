"""Rank 0 alone validates through the DDP wrapper, with a backward for its gradient norms; rank 1 trains on."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import faultclock


def validate(model, loader):
    for (x,) in loader:
        loss = model(x).pow(2).sum()
        loss.backward()  # FAULT
    return loss


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 8)))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(160, 8)), batch_size=8)
    val_loader = DataLoader(TensorDataset(torch.randn(24, 8)), batch_size=8)
    for epoch in range(2):
        for (x,) in loader:
            model(x).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        if rank == 0:
            faultclock.fired()
            validate(model, val_loader)
        dist.barrier()


if __name__ == "__main__":
    main()
