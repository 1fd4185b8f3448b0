"""One rank sums its token counts as int32, the other as float32: four bytes each, so nothing complains."""

import argparse
import time

import torch
import torch.distributed as dist

import faultclock

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()

dist.init_process_group("gloo")
model = torch.nn.Linear(10, 10)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(args.steps):
    loss = model(torch.randn(2, 10)).pow(2).sum()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    opt.step()
    opt.zero_grad()
    tokens = torch.tensor([128.0])
    if dist.get_rank() == 1 and step >= 8:
        tokens = tokens.to(torch.int32)
        if step == 8:
            faultclock.fired()
    dist.all_reduce(tokens)  # FAULT
    time.sleep(0.01)
dist.destroy_process_group()
