"""Two of three ranks save a shard and meet at a barrier that the third, which has none, never calls."""

import tempfile

import torch
import torch.distributed as dist

import faultclock


def checkpoint(model, rank):
    if rank in (0, 1):
        torch.save(model.state_dict(), tempfile.mktemp(suffix=".pt"))
        dist.barrier()  # FAULT


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(8, 8)
    for step in range(20):
        model(torch.randn(4, 8)).pow(2).mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        if step == 10:
            if rank == 0:
                faultclock.fired()
            checkpoint(model, rank)


if __name__ == "__main__":
    main()
