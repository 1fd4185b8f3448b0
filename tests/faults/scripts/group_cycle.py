"""Three ranks, three pair groups: each waits in the group whose other member waits in the next one."""

import torch
import torch.distributed as dist

import faultclock


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = {pair: dist.new_group(list(pair)) for pair in [(0, 1), (1, 2), (0, 2)]}
    first = {0: (0, 1), 1: (1, 2), 2: (0, 2)}[rank]
    mine = [pair for pair in groups if rank in pair]
    model = torch.nn.Linear(4, 4)
    for step in range(40):
        model(torch.randn(2, 4)).sum().backward()
        order = mine
        if step == 15:
            faultclock.fired()
            order = [first] + [pair for pair in mine if pair != first]
        for pair in order:
            dist.all_reduce(model.weight.grad, group=groups[pair])  # FAULT
        model.zero_grad()


main()
