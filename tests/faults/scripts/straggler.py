"""One rank computes three times as long in its forward; the all-reduce makes both look slow."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Net(torch.nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.extra = extra

    def forward(self, x):
        deadline = time.perf_counter() + self.extra
        while time.perf_counter() < deadline:
            torch.tanh(x)  # FAULT-ALSO
        return self.layer(x)  # FAULT-ALSO


def main():
    dist.init_process_group("gloo")
    faultclock.fired()
    model = DDP(Net(0.06 if dist.get_rank() == 1 else 0.01))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(500):
        loss = model(torch.randn(8, 64)).pow(2).mean()  # FAULT
        loss.backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
