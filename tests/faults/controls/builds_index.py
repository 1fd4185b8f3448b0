"""Datasets that build an index on first use: in a loader worker, then in the rank itself, then slowly."""

import os
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

PAUSE = float(os.environ.get("CONTROL_PAUSE", "11"))


class Lines(Dataset):
    def __init__(self, seconds, from_far=False):
        self.seconds = seconds
        self.from_far = from_far
        self.offsets = []

    def build(self):
        begun = time.monotonic()
        text = ("one line of the corpus\n" * 400).encode()
        at = 0
        while time.monotonic() - begun < self.seconds:
            for line in text.splitlines(keepends=True):
                self.offsets.append(at)
                at += len(line)
        self.offsets = self.offsets[:64] or [0]

    def fetch(self):
        for shard in range(int(self.seconds * 10)):
            time.sleep(0.1)  # the header of one shard, from a slow disk
            self.offsets.append(shard)
        self.offsets = self.offsets[:64] or [0]

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if not self.offsets:
            self.fetch() if self.from_far else self.build()
        return torch.full((8,), float(index))


def train(model, opt, dataset, workers):
    for batch in DataLoader(dataset, batch_size=8, num_workers=workers):
        loss = model(batch / 64).pow(2).mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()
    return loss


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds = PAUSE if dist.get_rank() == 1 else 0
    train(model, opt, Lines(0), 0)
    train(model, opt, Lines(seconds), 1)
    train(model, opt, Lines(seconds), 0)
    loss = train(model, opt, Lines(seconds, from_far=True), 0)
    print("RESULT", dist.get_rank(), repr(loss.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
