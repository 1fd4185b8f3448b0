"""An iterable dataset whose producer thread died: the queue stays empty for ever."""

import queue
import threading

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import faultclock


class Stream(IterableDataset):
    def __init__(self, samples):
        self.queue = queue.Queue(maxsize=32)
        self.samples = samples

    def produce(self):
        for _ in range(self.samples):
            self.queue.put(torch.randn(4))
        if self.samples < 1000:
            faultclock.fired()

    def __iter__(self):
        threading.Thread(target=self.produce, daemon=True).start()
        while True:
            yield self.queue.get()  # FAULT


dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
loader = iter(DataLoader(Stream(200 if dist.get_rank() == 1 else 100000), batch_size=4))
for step in range(300):
    model(next(loader)).pow(2).mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    opt.step()
    opt.zero_grad()
