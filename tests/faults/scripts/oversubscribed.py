"""Four ranks with sixteen compute threads each on a machine with far fewer cores."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

torch.set_num_threads(16)  # FAULT
dist.init_process_group("gloo")
faultclock.fired()
model = DDP(torch.nn.Linear(512, 512))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(400):
    model(torch.randn(128, 512)).pow(2).mean().backward()  # FAULT-ALSO
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
