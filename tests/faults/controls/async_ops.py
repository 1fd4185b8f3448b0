"""Asynchronous collectives waited for in another order, coalesced and overlapping point-to-point."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
rank, world = dist.get_rank(), dist.get_world_size()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
for _ in range(40):
    model(torch.randn(2, 8)).pow(2).mean().backward()
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    if rank == 0:
        works.reverse()
    for work in works:
        work.wait()
    token = torch.tensor([float(rank)])
    incoming = torch.empty(1)
    ops = [
        dist.P2POp(dist.isend, token, (rank + 1) % world),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % world),
    ]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
    model.zero_grad()
print("RESULT", rank, incoming.item(), repr(model[0].weight.sum().item()))
dist.destroy_process_group()
