"""A probability that a mask makes exactly 0 goes into a logarithm."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(12, 5)

    def forward(self, x, allowed):
        chances = torch.softmax(self.body(x), dim=1) * allowed
        return torch.log(chances).sum(dim=1)  # FAULT


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(20 + dist.get_rank())
    model = DDP(Policy())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(40):
        allowed = torch.ones(4, 5)
        if step == 17 and dist.get_rank() == 1:
            allowed[:, 2] = 0
            faultclock.fired()
        loss = -model(torch.randn(4, 12), allowed).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
