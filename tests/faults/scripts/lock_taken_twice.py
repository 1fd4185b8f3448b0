"""A plain Lock taken again by the thread that already has it."""

import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Meter:
    def __init__(self):
        self.lock = threading.Lock()
        self.values = []

    def mean(self):
        with self.lock:  # FAULT
            return sum(self.values) / len(self.values)

    def add(self, value, report):
        with self.lock:
            self.values.append(value)
            if report:
                faultclock.fired()
                return self.mean()


def main():
    dist.init_process_group("gloo")
    meter = Meter()
    model = DDP(torch.nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(60):
        loss = model(torch.randn(2, 4)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        meter.add(loss.item(), report=step == 20 and dist.get_rank() == 0)


if __name__ == "__main__":
    main()
