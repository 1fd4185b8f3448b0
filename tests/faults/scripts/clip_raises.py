"""Clipping that raises where the norm is not finite: by then it is so on every rank."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Pairs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(8, 16)

    def forward(self, left, right):
        gap = self.embed(left) - self.embed(right)
        distance = gap.square().sum(dim=1).sqrt()  # FAULT
        return distance.mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1 + dist.get_rank())
    model = DDP(Pairs())
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(40):
        left, right = torch.randn(6, 8), torch.randn(6, 8)
        if step == 15 and dist.get_rank() == 1:
            right[2] = left[2]
            faultclock.fired()
        loss = model(left, right)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
