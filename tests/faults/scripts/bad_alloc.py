"""A rank that keeps every activation runs into its address-space limit."""

import resource

import torch
import torch.distributed as dist

import faultclock


def limit(extra_bytes):
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, used + extra_bytes))


dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
history = []
for step in range(300):
    out = model(torch.randn(16, 64))
    out.sum().backward()
    dist.all_reduce(model.weight.grad)
    model.zero_grad()
    if dist.get_rank() == 1:
        if step == 10:
            limit(512 * 2**20)
        if step >= 10:
            if len(history) == 15:
                faultclock.fired()
            history.append(torch.ones(8_000_000))  # FAULT
