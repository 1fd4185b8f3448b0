"""W&B on rank 0 waits for a server that never answers."""

import torch
import torch.distributed as dist
import wandb
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        faultclock.fired()
        wandb.init(project="tiny", config={"lr": 1e-3})  # FAULT
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(50):
        model(torch.randn(4, 8)).mean().backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
