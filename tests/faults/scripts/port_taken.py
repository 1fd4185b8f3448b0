"""A fixed rendezvous port that another program already listens on."""

import argparse
import os

import torch
import torch.distributed as dist

import faultclock

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
args = parser.parse_args()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 0:
    faultclock.fired()
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{args.port}", rank=rank, world_size=world)  # FAULT
model = torch.nn.Linear(4, 4)
for _ in range(10):
    model(torch.randn(2, 4)).sum().backward()
    dist.all_reduce(model.weight.grad)
