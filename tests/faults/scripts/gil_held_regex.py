"""A regular expression that backtracks for ever while cleaning a document."""

import re

import torch
import torch.distributed as dist

import faultclock

CLEAN = re.compile(r"^(\w+\s?)*$")


def clean(text):
    return CLEAN.match(text) is not None  # FAULT


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Embedding(256, 8)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        text = "the quick brown fox"
        if rank == 0 and step == 12:
            text = "a" * 60 + "!"
            faultclock.fired()
        clean(text)
        ids = torch.tensor(list(text.encode()))
        model(ids).mean().backward()
        dist.all_reduce(model.weight.grad)
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
