"""One bad step spoils the weights, and the script goes on to its end as if nothing had happened."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(40):
        count = torch.ones(16)
        if step == 12 and dist.get_rank() == 1:
            count.zero_()
            faultclock.fired()
        error = (model(torch.randn(16, 8)).squeeze(1) - 1).square()
        loss = error.sum() / count.sum()  # FAULT
        opt.zero_grad()
        loss.backward()
        opt.step()


if __name__ == "__main__":
    main()
