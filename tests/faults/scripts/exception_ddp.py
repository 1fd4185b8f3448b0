"""An exception on one rank while the other waits for its gradients."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def compute_loss(model, batch, step):
    out = model(batch)
    if dist.get_rank() == 1 and step == 12:
        faultclock.fired()
        raise ValueError(f"label 17 out of range at step {step}")  # FAULT
    return out.pow(2).mean()


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Linear(16, 16))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        compute_loss(model, torch.randn(4, 16), step).backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
