"""A check of the script's own that has nothing to do with numbers that are not finite."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1 + dist.get_rank())
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(40):
        inputs = torch.randn(6, 8)
        if step == 15 and dist.get_rank() == 1:
            inputs *= 1e4
            faultclock.fired()
        loss = model(inputs).square().mean()
        if loss > 1e4:
            raise ValueError(f"loss is {loss.item():.3g} at step {step}")  # FAULT
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
