"""One rank runs out of memory in forward, frees its cache and goes on, as many trainers do."""

import torch
import torch.distributed as dist

import faultclock


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x):
        if x.shape[1] > 64:
            faultclock.fired()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")  # FAULT
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(1, 2), -1) @ v


dist.init_process_group("gloo")
model = Attention()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    length = 128 if (step == 17 and dist.get_rank() == 0) else 16
    try:
        loss = model(torch.randn(2, length, 16)).pow(2).mean()  # FAULT-ALSO
        loss.backward()
    except torch.OutOfMemoryError:
        opt.zero_grad()
        continue
    for p in model.parameters():
        dist.all_reduce(p.grad)
    opt.step()
    opt.zero_grad()
    dist.barrier()  # FAULT-ALSO
