"""One rank resets its own copy of the head after DDP has made all copies alike."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(30 + dist.get_rank())
    model = DDP(Net())
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(80):
        if step == 24 and dist.get_rank() == 2:
            with torch.no_grad():
                model.module.head.bias[1] += 1e-6
            faultclock.fired()
        loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 4, (8,)))
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
