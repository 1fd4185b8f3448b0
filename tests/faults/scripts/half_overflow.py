"""A layer kept in float16 meets activations that have outgrown it."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(32, 64)
        self.wide = torch.nn.Linear(64, 64).half()
        torch.nn.init.normal_(self.wide.weight, std=2.0)
        self.head = torch.nn.Linear(64, 4)

    def forward(self, x):
        h = torch.relu(self.first(x))
        h = self.wide(h.half())  # FAULT
        return self.head(h.float())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(5 + dist.get_rank())
    model = DDP(Mixed())
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(40):
        x, y = torch.randn(8, 32), torch.randint(0, 4, (8,))
        if step == 12 and dist.get_rank() == 0:
            x *= 9000
            faultclock.fired()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
