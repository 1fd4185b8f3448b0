"""An index past the end of a plain table, on the device."""

import os

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
model = torch.nn.Linear(8, 8).to(device)
table = torch.randn(100, 8, device=device)
for step in range(50):
    rows = torch.randint(0, 100, (4,), device=device)
    if step == 10 and dist.get_rank() == 1:
        rows += 100
        faultclock.fired()
    loss = model(table[rows]).sum()  # FAULT
    loss.backward()  # FAULT-ALSO
    grad = model.weight.grad.cpu()  # FAULT-ALSO
    dist.all_reduce(grad)
    model.zero_grad()
