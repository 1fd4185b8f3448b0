"""Plain all_reduce loop of three ranks; one rank leaves its gradients out once and runs ahead to the barrier."""

import torch
import torch.distributed as dist

import faultclock


def sync(grads):
    for g in grads:
        dist.all_reduce(g)


def run_epoch(model, opt, batches, rank, epoch):
    for i, x in enumerate(batches):
        loss = model(x).pow(2).mean()
        loss.backward()
        bad = rank == 2 and epoch == 1 and i == 3
        if bad:
            faultclock.fired()
        if not bad:
            sync([p.grad for p in model.parameters()])
        opt.step()
        opt.zero_grad()
        dist.barrier()  # FAULT


dist.init_process_group("gloo")
net = torch.nn.Linear(20, 2)
sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
for e in range(4):
    run_epoch(net, sgd, torch.randn(8, 5, 20), dist.get_rank(), e)
dist.destroy_process_group()
