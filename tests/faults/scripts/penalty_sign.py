"""A penalty on large weights is subtracted where it should be added: the gradients grow a little with every step."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(310):
        if step == 250:
            faultclock.fired()
        inputs = torch.randn(16, 16)
        loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(dim=1))
        penalty = sum(weight.square().sum() for weight in model.module[2].parameters())
        (loss - 0.15 * penalty).backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
