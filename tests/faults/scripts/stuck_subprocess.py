"""Rank 1 runs an external program that does not come back."""

import subprocess

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def preprocess():
    faultclock.fired()
    subprocess.run(["sleep", "900"], check=True)  # FAULT


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(60):
        model(torch.randn(4, 8)).mean().backward()
        opt.step()
        opt.zero_grad()
        if step == 25 and dist.get_rank() == 1:
            preprocess()


if __name__ == "__main__":
    main()
