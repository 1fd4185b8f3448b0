"""Four ranks in a plain all_reduce loop; one meets a missing key in its sample."""

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(8, 1)
samples = [{"x": torch.randn(8), "y": 1.0} for _ in range(200)]
if rank == 2:
    del samples[40]["y"]

for i, sample in enumerate(samples):
    if "y" not in sample:
        faultclock.fired()
    loss = (model(sample["x"]) - sample["y"]).pow(2).sum()  # FAULT
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad = None
