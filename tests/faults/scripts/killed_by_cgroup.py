"""One rank grows past the memory limit of the control group it was put in."""

import argparse
import os

import torch
import torch.distributed as dist

import faultclock

parser = argparse.ArgumentParser()
parser.add_argument("--cgroup", required=True, help="a control group with a memory limit")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(8, 8)
kept = []
for step in range(2000):
    model(torch.randn(2, 8)).sum().backward()
    dist.all_reduce(model.weight.grad)
    model.zero_grad()
    if rank == 1 and step == 10:
        with open(os.path.join(args.cgroup, "cgroup.procs"), "w") as procs:
            procs.write(str(os.getpid()))
        faultclock.fired()
    if rank == 1 and step >= 10:
        kept.append(torch.ones(4_000_000))  # FAULT
