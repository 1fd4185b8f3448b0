"""A monitor keeps the outputs of every step for a plot that nobody draws."""

import time
from collections import deque

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Monitor:
    def __init__(self, rank):
        self.rank = rank
        self.outputs = deque()

    def after_step(self, output):
        if self.rank == 1:
            self.outputs.append(output)  # FAULT


def main():
    dist.init_process_group("gloo")
    faultclock.fired()
    model = DDP(torch.nn.Linear(64, 64))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(dist.get_rank())
    for _ in range(1200):
        output = model(torch.randn(512, 64))
        output.pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
        monitor.after_step(output.detach().clone())
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
