"""One rank gives up with `raise SystemExit`, which no hook of Python's ever sees, while the other goes on."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def next_shard(step):
    if dist.get_rank() == 1 and step == 12:
        faultclock.fired()
        raise SystemExit(f"no shard for step {step}")  # FAULT


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(16, 16))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        next_shard(step)
        model(torch.randn(4, 16)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
