"""Two data-parallel pairs; in the second pair one rank broadcasts where its partner reduces."""

import torch
import torch.distributed as dist

import faultclock


class Trainer:
    def __init__(self):
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.pair = pairs[self.rank // 2]
        self.leader = self.rank // 2 * 2
        self.model = torch.nn.Linear(32, 8)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, i):
        loss = self.model(torch.randn(4, 32)).square().mean()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        if i == 9 and self.rank == 3:
            faultclock.fired()
            dist.broadcast(flat, src=self.leader, group=self.pair)  # FAULT
        else:
            dist.all_reduce(flat, group=self.pair)
        self.opt.step()
        self.opt.zero_grad()

    def fit(self):
        for i in range(40):
            self.step(i)
            dist.all_reduce(torch.ones(1))


Trainer().fit()
