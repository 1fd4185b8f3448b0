"""A typing error in the learning rate: 3e-9 where 3e-3 was meant, and the loss stays where it began."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

WORDS = 64


class NextWord(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 32)
        self.body = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, WORDS)

    def forward(self, words):
        return self.head(torch.tanh(self.body(self.embed(words))))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(NextWord())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-9)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(260):
        if step == 200:
            faultclock.fired()
        words = torch.randint(0, WORDS, (16, 8))
        follows = (words * 5 + 3) % WORDS
        loss = torch.nn.functional.cross_entropy(model(words).flatten(0, 1), follows.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
