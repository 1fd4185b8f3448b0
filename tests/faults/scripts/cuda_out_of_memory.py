"""One rank asks for more device memory than there is."""

import os

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
model = torch.nn.Linear(64, 64).to(device)
for step in range(50):
    x = torch.randn(8, 64, device=device)
    if step == 10 and dist.get_rank() == 1:
        faultclock.fired()
        x = torch.empty(2**40, 64, device=device)  # FAULT
    model(x).sum().backward()
    grad = model.weight.grad.cpu()
    dist.all_reduce(grad)
    model.zero_grad()
