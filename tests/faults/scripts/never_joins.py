"""One of three ranks waits for a lock file before it joins the process group."""

import os
import time

import torch
import torch.distributed as dist

import faultclock


def wait_for_mount():
    while True:
        time.sleep(1)  # FAULT


def main():
    if os.environ["RANK"] == "2":
        faultclock.fired()
        wait_for_mount()
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    for _ in range(10):
        model(torch.randn(2, 4)).sum().backward()
        dist.all_reduce(model.weight.grad)


if __name__ == "__main__":
    main()
