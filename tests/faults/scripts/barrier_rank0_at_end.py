"""Rank 0 waits for everybody after its last save; the others never come."""

import tempfile

import torch
import torch.distributed as dist

import faultclock


def save(model, path):
    torch.save(model.state_dict(), path)
    faultclock.fired()
    dist.barrier()  # FAULT


def main():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 2)
    for _ in range(30):
        model(torch.randn(4, 8)).sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad = None
    if dist.get_rank() == 0:
        save(model, tempfile.mktemp(suffix=".pt"))
    else:
        torch.ones(1).sum().item()


if __name__ == "__main__":
    main()
