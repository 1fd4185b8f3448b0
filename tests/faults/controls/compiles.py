"""Rank 0 compiles a second graph while its peer waits: Inductor writes files, and its workers compile them."""

import os

import torch
import torch.distributed as dist

COMPILES = os.environ.get("CONTROL_PAUSE", "1") != "0"


class Net(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(depth))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = torch.softmax(layer(x), dim=-1).cumsum(0) if number % 2 else torch.tanh(layer(x)).sort(dim=-1).values
        return x


def evaluate(depth):
    model = Net(depth)
    compiled = torch.compile(model, dynamic=False) if COMPILES else model
    for rows in (3, 5, 7):
        compiled(torch.ones(rows, 32)).sum().backward()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 32)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        loss = model(torch.randn(4, 32)).pow(2).mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()
        if step == 15:
            if dist.get_rank() == 0:
                evaluate(depth=12)
            dist.barrier()
    print("RESULT", dist.get_rank(), "trained", step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
