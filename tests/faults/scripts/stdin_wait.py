"""Rank 0 asks whether to overwrite and waits for an answer nobody gives."""

import torch
import torch.distributed as dist

import faultclock


def confirm(question):
    faultclock.fired()
    return input(question + " [y/N] ").lower() == "y"  # FAULT


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0 and not confirm("output folder exists, overwrite?"):
        raise SystemExit(1)
    dist.barrier()
    model = torch.nn.Linear(8, 8)
    for _ in range(20):
        model(torch.randn(2, 8)).sum().backward()
        dist.all_reduce(model.weight.grad)


if __name__ == "__main__":
    main()
