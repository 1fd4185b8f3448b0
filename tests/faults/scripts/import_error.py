"""A package that is missing in the environment of one rank."""

import os

import torch
import torch.distributed as dist

import faultclock

if os.environ["RANK"] == "1":
    faultclock.fired()
    import fast_tokenizer_kernels  # FAULT  # noqa: F401

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
for _ in range(10):
    model(torch.randn(2, 4)).sum().backward()
    dist.all_reduce(model.weight.grad)
