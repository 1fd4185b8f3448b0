"""Rank 0 alone gathers a statistic for its log line."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def log_grad_norm(model, step):
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    norms = [torch.zeros_like(norm) for _ in range(dist.get_world_size())]
    faultclock.fired()
    dist.all_gather(norms, norm)  # FAULT
    print(f"step {step} grad norm {torch.stack(norms).mean():.3f}")


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(32, 32))
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(100):
        model(torch.randn(4, 32)).pow(2).mean().backward()
        if dist.get_rank() == 0 and step == 25:
            log_grad_norm(model, step)
        opt.step()
        opt.zero_grad()
        dist.broadcast(torch.zeros(1), 0)


if __name__ == "__main__":
    main()
