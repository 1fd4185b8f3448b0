"""Rank 0 draws the weights of a large model one by one; the others wait for them."""

import os
import time

import torch
import torch.distributed as dist

PAUSE = float(os.environ.get("CONTROL_PAUSE", "14"))


def fill(weight):
    weight.normal_(0.0, 0.02)


def draw(weights, seconds):
    end = time.monotonic() + seconds
    for weight in weights:
        if time.monotonic() < end:
            fill(weight)


def main():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(16, 16)
    if dist.get_rank() == 0:
        draw([torch.empty(1 << 23)] * 10_000, PAUSE)
    for p in model.parameters():
        dist.broadcast(p.detach().fill_(0.5), src=0)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        loss = model(torch.ones(4, 16)).pow(2).mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()
    print("RESULT", dist.get_rank(), repr(loss.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
