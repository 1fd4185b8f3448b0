"""A C library call that neither returns nor lets go of the interpreter lock."""

import ctypes

import torch
import torch.distributed as dist

import faultclock

libc = ctypes.PyDLL(None)


def decode(frame):
    faultclock.fired()
    libc.sleep(frame)  # FAULT


def main():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    for step in range(50):
        if dist.get_rank() == 1 and step == 10:
            decode(3600)
        model(torch.randn(2, 8)).sum().backward()
        dist.all_reduce(model.weight.grad)
        model.zero_grad()


if __name__ == "__main__":
    main()
