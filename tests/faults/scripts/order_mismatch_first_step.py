"""Three ranks, no history: one of them gathers while the other two reduce."""

import torch
import torch.distributed as dist

import faultclock


def average(tensor):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def collect(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    faultclock.fired()
    dist.all_gather(parts, tensor)  # FAULT
    return torch.stack(parts).mean(0)


def main():
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    reduce = collect if dist.get_rank() == 2 else average
    for _ in range(30):
        loss = model(torch.randn(4, 8)).mean()
        loss.backward()
        for p in model.parameters():
            p.grad = reduce(p.grad)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
