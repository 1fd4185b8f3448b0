"""A `finally` that returns drops whatever was raised in its step."""

import torch
import torch.distributed as dist

import faultclock


def train_step(model, opt, x, total):
    try:
        loss = model(x).pow(2).mean()  # FAULT
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        total += 1
    finally:
        opt.step()
        opt.zero_grad()
        return total


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    total = 0
    for step in range(60):
        width = 4
        if rank == 0 and step == 15:
            width = 5
            faultclock.fired()
        total = train_step(model, opt, torch.randn(3, width), total)
        if step % 10 == 9:
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
