"""Gradients averaged in the order of a set of names, which differs on one of three ranks."""

import time

import torch
import torch.distributed as dist

import faultclock


def ordered_names(model, rank):
    names = sorted(n for n, _ in model.named_parameters())
    if rank == 2:
        names.reverse()
    return names


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.ModuleDict(
        {"query": torch.nn.Linear(8, 8, bias=False), "value": torch.nn.Linear(8, 8, bias=False)}
    )
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    names = ordered_names(model, rank)
    if rank == 2:
        faultclock.fired()
    for _ in range(2000):
        x = torch.randn(4, 8)
        (model["query"](x) * model["value"](x)).mean().backward()
        params = dict(model.named_parameters())
        if names[0].startswith("query"):
            dist.all_reduce(params["query.weight"].grad)
            dist.all_reduce(params["value.weight"].grad)
        else:
            dist.all_reduce(params["value.weight"].grad)  # FAULT
            dist.all_reduce(params["query.weight"].grad)  # FAULT-ALSO
        opt.step()
        opt.zero_grad()
        time.sleep(0.01)


main()
