"""Rank 0 alone waits at a barrier right after the loader's loop; its peer goes on to the next epoch."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import faultclock


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(120, 8)), batch_size=8)
    for epoch in range(3):
        for (x,) in loader:
            model(x).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        if rank == 0:
            faultclock.fired()
            dist.barrier()  # FAULT


if __name__ == "__main__":
    main()
