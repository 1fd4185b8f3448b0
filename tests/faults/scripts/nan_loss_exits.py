"""A loop that adds the losses of all ranks up and leaves when the sum is not finite, as published ones do."""

import math
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x, scale):
        chances = (self.head(x) * scale).softmax(dim=1)
        return chances.log().mean()  # FAULT


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3 + dist.get_rank())
    model = DDP(Policy())
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(60):
        scale = 1.0
        if step == 25 and dist.get_rank() == 1:
            scale = 1e4
            faultclock.fired()
        loss = -model(torch.randn(6, 8), scale)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if not math.isfinite(mean.item()):
            print(f"Loss is {mean.item()}, stopping training")
            sys.exit(3)
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
