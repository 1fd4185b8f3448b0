"""Rank 0 hosts the store, finishes first and leaves; its peers still need the store for a new group."""

import os

import torch
import torch.distributed as dist

import faultclock

PORT = int(os.environ["MASTER_PORT"]) + 1 if "MASTER_PORT" in os.environ else 29555


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", PORT, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = torch.nn.Linear(8, 8)
    for _ in range(30):
        model(torch.randn(2, 8)).sum().backward()
        dist.all_reduce(model.weight.grad)
        model.zero_grad()
    if rank == 0:
        faultclock.fired()
        os._exit(0)  # FAULT
    store.wait(["evaluation-plan"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
