"""Three ranks; one evaluates one batch more than the others and reduces its loss alone."""

import torch
import torch.distributed as dist

import faultclock


@torch.no_grad()
def evaluate(model, batches):
    total = torch.zeros(1)
    for x in batches:
        loss = model(x).abs().mean().reshape(1)
        dist.all_reduce(loss)  # FAULT
        total += loss
    return total


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(8, 8)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(6):
    for _ in range(5):
        model(torch.randn(2, 8)).pow(2).mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()
    count = 4
    if rank == 1 and epoch == 3:
        faultclock.fired()
        count = 5
    evaluate(model, torch.randn(count, 2, 8))
    dist.barrier()
