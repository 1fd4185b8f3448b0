"""A layer that one rank leaves out in one step: DDP's reducer never fires its bucket there."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(16, 16)
        self.extra = torch.nn.Linear(16, 16)

    def forward(self, x, use_extra):
        h = self.trunk(x)
        return self.extra(h) if use_extra else h


dist.init_process_group("gloo")
model = DDP(Gated())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    use_extra = not (step == 9 and dist.get_rank() == 1)
    if not use_extra:
        faultclock.fired()
    loss = model(torch.randn(4, 16), use_extra).mean()  # FAULT
    loss.backward()  # FAULT-ALSO
    opt.step()
    opt.zero_grad()
