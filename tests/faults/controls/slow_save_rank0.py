"""Rank 0 writes a large checkpoint while its peers wait at the barrier."""

import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

PAUSE = float(os.environ.get("CONTROL_PAUSE", "12"))


class SlowFile:
    """A file on a slow mount."""

    def __init__(self, path, seconds):
        self.file = open(path, "wb")
        self.seconds = seconds

    def write(self, data):
        time.sleep(self.seconds)
        self.seconds = 0
        return self.file.write(data)

    def flush(self):
        self.file.flush()


dist.init_process_group("gloo")
torch.manual_seed(1)
model = DDP(torch.nn.Linear(16, 16))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(40):
    loss = model(torch.randn(4, 16)).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    if step == 20:
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), SlowFile(tempfile.mktemp(suffix=".pt"), PAUSE))
        dist.barrier()
print("RESULT", dist.get_rank(), repr(loss.item()))
dist.destroy_process_group()
