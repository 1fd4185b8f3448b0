"""Two threads of one rank take two locks in opposite order."""

import threading

import torch
import torch.distributed as dist

import faultclock

cache_lock = threading.Lock()
stats_lock = threading.Lock()
halfway = threading.Barrier(2)


def flush():
    with stats_lock:
        halfway.wait()
        with cache_lock:  # FAULT-ALSO
            pass


def record():
    with cache_lock:
        halfway.wait()
        faultclock.fired()
        with stats_lock:  # FAULT
            pass


dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
for step in range(50):
    model(torch.randn(2, 8)).sum().backward()
    dist.all_reduce(model.weight.grad)
    model.zero_grad()
    if dist.get_rank() == 1 and step == 10:
        threading.Thread(target=flush, daemon=True).start()
        record()
