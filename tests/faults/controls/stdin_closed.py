"""Started by cron: standard input is closed, and the script looks at it."""

import sys

import torch
import torch.distributed as dist

try:
    leftover = sys.stdin.read() if sys.stdin is not None else ""
except (OSError, ValueError):
    leftover = ""
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
for _ in range(20):
    model(torch.randn(2, 4)).pow(2).mean().backward()
    dist.all_reduce(model.weight.grad)
    with torch.no_grad():
        model.weight -= 0.01 * model.weight.grad
    model.zero_grad()
print("RESULT", dist.get_rank(), len(leftover), repr(model.weight.sum().item()))
dist.destroy_process_group()
