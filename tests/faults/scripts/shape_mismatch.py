"""The last, smaller batch on one rank makes its gathered predictions shorter."""

import torch
import torch.distributed as dist

import faultclock

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(8, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = torch.randn(20 * 16 if rank != 1 else 20 * 16 - 5, 8)

for batch in dataset.split(16):
    logits = model(batch)
    logits.logsumexp(1).mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    opt.step()
    opt.zero_grad()
    predicted = logits.detach().argmax(1).float()
    everyone = [torch.empty_like(predicted) for _ in range(world)]
    if len(batch) < 16:
        faultclock.fired()
    dist.all_gather(everyone, predicted)  # FAULT
dist.barrier()
dist.destroy_process_group()
