"""One sample of one rank holds a NaN; after the all-reduce every rank has it."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 64)
        self.down = torch.nn.Linear(64, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Net())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(60):
        x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
        if step == 22 and dist.get_rank() == 1:
            x[5, 3] = float("nan")
            faultclock.fired()
        logits = model(x)  # FAULT
        loss = torch.nn.functional.cross_entropy(logits, y)
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
