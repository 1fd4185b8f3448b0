"""One rank asks for more memory than the machine will ever give."""

import torch
import torch.distributed as dist

import faultclock


def build_index(rows):
    faultclock.fired()
    return bytearray(rows * 1024)  # FAULT


def main():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    for step in range(50):
        model(torch.randn(2, 8)).sum().backward()
        dist.all_reduce(model.weight.grad)
        model.zero_grad()
        if step == 12 and dist.get_rank() == 1:
            build_index(2**50)


if __name__ == "__main__":
    main()
