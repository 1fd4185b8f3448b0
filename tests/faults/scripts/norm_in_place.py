"""A forward normalises its input in place; a constant sample becomes 0/0, but the data is not to blame."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)

    def forward(self, x):
        x -= x.mean(dim=1, keepdim=True)
        x /= x.std(dim=1, keepdim=True)  # FAULT
        return self.down(torch.tanh(self.up(x)))


def main():
    dist.init_process_group("gloo")
    model = DDP(Net())
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(50):
        x = torch.randn(8, 8)
        if dist.get_rank() == 1 and step == 20:
            x[4] = 3.0
            faultclock.fired()
        loss = (model(x) - torch.randn(8, 2)).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
