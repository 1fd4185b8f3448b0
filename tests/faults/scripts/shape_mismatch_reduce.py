"""A resized embedding on one of three ranks: its gradient has another number of rows."""

import torch
import torch.distributed as dist

import faultclock


class Model(torch.nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, 16)
        self.head = torch.nn.Linear(16, 4)

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))


def train(model, steps):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.randint(0, 100, (4, 6))).sum().backward()
        if step == 10 and dist.get_rank() == 0:
            grown = torch.zeros(128, 16)
            grown[:100] = model.embed.weight.grad
            model.embed.weight = torch.nn.Parameter(torch.randn(128, 16))
            model.embed.weight.grad = grown
            faultclock.fired()
        for p in model.parameters():
            dist.all_reduce(p.grad)  # FAULT
        opt.step()
        opt.zero_grad()


dist.init_process_group("gloo")
train(Model(100), 50)
