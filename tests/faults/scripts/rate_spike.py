"""The schedule multiplies the learning rate by a hundred thousand in the middle of the run."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1e5 if step >= 30 else 1.0)
    torch.manual_seed(dist.get_rank())
    for step in range(70):
        if step == 30:
            faultclock.fired()
        x = torch.randn(8, 16)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        schedule.step()


if __name__ == "__main__":
    main()
