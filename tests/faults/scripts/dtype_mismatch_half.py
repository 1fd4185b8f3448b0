"""Three ranks; the last one fell back to float16 gradients where the others use bfloat16."""

import time

import torch
import torch.distributed as dist

import faultclock


def pick_dtype(rank):
    if rank == 2:
        faultclock.fired()
        return torch.float16
    return torch.bfloat16


def average_gradients(model, dtype):
    for p in model.parameters():
        buffer = p.grad.to(dtype)
        dist.all_reduce(buffer)  # FAULT
        p.grad.copy_(buffer / dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    dtype = pick_dtype(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))
    opt = torch.optim.Adam(model.parameters())
    for _ in range(2000):
        model(torch.randn(6, 12)).sum().backward()
        average_gradients(model, dtype)
        opt.step()
        opt.zero_grad()
        time.sleep(0.01)


if __name__ == "__main__":
    main()
