"""Every rank opens its own W&B run."""

import torch
import torch.distributed as dist
import wandb
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def main():
    dist.init_process_group("gloo")
    faultclock.fired()
    wandb.init(project="tiny")  # FAULT
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(600):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        wandb.log({"loss": loss.item()}, step=step)
    wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
