"""Flat gradients; rank 2 once forgets to copy the averaged gradients back."""

import time

import torch
import torch.distributed as dist

import faultclock


def average(model, keep):
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    if not keep:
        return
    start = 0
    for p in model.parameters():
        p.grad.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = torch.nn.Linear(16, 16)
    torch.manual_seed(5 + rank)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(400):
        model(torch.randn(4, 16)).pow(2).mean().backward()
        wrong = rank == 2 and step == 13
        if wrong:
            faultclock.fired()
        average(model, not wrong)
        opt.step()
        opt.zero_grad()
        time.sleep(0.02)


main()
