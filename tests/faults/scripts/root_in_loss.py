"""A root mean square error that one rank brings down to exactly 0, computed outside the model."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3 + dist.get_rank())
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(40):
        x = torch.randn(4, 8)
        out = model(x)
        target = torch.zeros(4, 2)
        if step == 18 and dist.get_rank() == 1:
            target = out.detach().clone()
            faultclock.fired()
        error = (out - target) ** 2
        loss = torch.sqrt(error.mean())  # FAULT
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
