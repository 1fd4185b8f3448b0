"""Every rank polls for a file that the other one should write first."""

import os
import tempfile
import time

import torch
import torch.distributed as dist

import faultclock


def wait_for(path):
    while not os.path.exists(path):  # FAULT
        time.sleep(0.005)  # FAULT-ALSO


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = tempfile.mkdtemp()
    model = torch.nn.Linear(8, 8)
    for step in range(40):
        model(torch.randn(2, 8)).sum().backward()
        dist.all_reduce(model.weight.grad)
        model.zero_grad()
        if step == 10 and rank == 0:
            faultclock.fired()
            wait_for(os.path.join(folder, "rank1.done"))
        with open(os.path.join(folder, f"rank{rank}.done"), "w"):
            pass


if __name__ == "__main__":
    main()
