"""Manual data parallel, each rank with its own seed, never broadcast."""

import time

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
faultclock.fired()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(400):
    loss = model(torch.randn(8, 16)).pow(2).mean()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    opt.step()
    opt.zero_grad()
    time.sleep(0.02)
dist.destroy_process_group()
