"""A wild pointer in a C extension."""

import ctypes

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def fused_kernel(address):
    return ctypes.string_at(address, 8)  # FAULT


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 8))
    for step in range(60):
        model(torch.randn(2, 8)).mean().backward()
        if step == 14 and dist.get_rank() == 1:
            faultclock.fired()
            fused_kernel(0xDEADBEEFDEADBEEF)


if __name__ == "__main__":
    main()
