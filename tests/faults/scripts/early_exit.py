"""One rank believes it is done and exits with code 0."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    target = -1.0
    for step in range(100):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step == 22 and dist.get_rank() == 1:
            target = 1e9
        if loss.item() < target:
            print("converged")
            faultclock.fired()
            sys.exit(0)  # FAULT


if __name__ == "__main__":
    main()
