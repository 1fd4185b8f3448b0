"""Rank 2 broadcasts from the root of its own node; the others from rank 0."""

import torch
import torch.distributed as dist

import faultclock


def share(settings, root):
    dist.broadcast(settings, src=root)  # FAULT
    return settings


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(8, 8)
    for step in range(20):
        model(torch.randn(4, 8)).sum().backward()
        dist.all_reduce(model.weight.grad)
        root = 0
        if step == 10 and rank == 2:
            root = 1
            faultclock.fired()
        share(torch.ones(4), root)
        dist.barrier()


if __name__ == "__main__":
    main()
