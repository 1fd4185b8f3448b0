"""Manual all_reduce; rank 2's dataset stops for 150 ms at every eighth batch."""

import time

import torch
import torch.distributed as dist

import faultclock


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8000

    def __getitem__(self, i):
        if dist.get_rank() == 2 and i % 64 == 0:
            time.sleep(0.15)  # FAULT
        return torch.randn(16)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
faultclock.fired()
for x in torch.utils.data.DataLoader(Data(), batch_size=8):  # FAULT-ALSO
    time.sleep(0.02)
    model(x).pow(2).mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
