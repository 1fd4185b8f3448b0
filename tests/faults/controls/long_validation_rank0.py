"""Rank 0 validates for half a minute; the others wait for its number."""

import os
import time

import torch
import torch.distributed as dist

PAUSE = float(os.environ.get("CONTROL_PAUSE", "30"))


@torch.no_grad()
def validate(model):
    model.eval()
    end = time.monotonic() + PAUSE
    losses = [model(torch.ones(4, 16)).pow(2).mean()]
    while time.monotonic() < end:
        model(torch.ones(256, 16)).pow(2).mean()
        time.sleep(0.01)
    model.train()
    return losses[0].reshape(1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    rank = dist.get_rank()
    model = torch.nn.Linear(16, 16)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        model(torch.randn(4, 16)).pow(2).mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()
        if step == 15:
            value = validate(model) if rank == 0 else torch.zeros(1)
            dist.broadcast(value, src=0)
    print("RESULT", rank, repr(value.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
