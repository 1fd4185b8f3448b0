"""A module counts its own calls and divides 0 by 0 in one of them; run again, it is finite."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Warmup(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank, self.calls = rank, 0

    def forward(self, x):
        self.calls += 1
        if self.rank == 0 and self.calls == 21:
            x = torch.zeros_like(x) * x
            faultclock.fired()
        return x / x.std(dim=1, keepdim=True)  # FAULT


class Net(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.up, self.warmup, self.down = torch.nn.Linear(8, 8), Warmup(rank), torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.down(torch.tanh(self.warmup(self.up(x))))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Net(dist.get_rank()))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(50):
        loss = (model(torch.randn(8, 8)) - torch.randn(8, 2)).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
