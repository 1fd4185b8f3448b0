"""Rank 0 scores generated text in plain Python for 20 s; the others wait for its number."""

import os
import time

import torch
import torch.distributed as dist

PAUSE = float(os.environ.get("CONTROL_PAUSE", "20"))
TEXT = "the quick brown fox jumps over the lazy dog and the dog sleeps on " * 20


def pairs(words):
    counts = {}
    for left, right in zip(words, words[1:], strict=False):
        counts[left, right] = counts.get((left, right), 0) + 1
    return counts


def overlap(candidate, reference):
    wanted = pairs(reference)
    shared = 0
    for pair, count in pairs(candidate).items():
        shared += min(count, wanted.get(pair, 0))
    return shared / max(1, len(candidate) - 1)


def score(seconds):
    end = time.monotonic() + seconds
    total, scored = 0.0, 0
    while time.monotonic() < end:
        words = TEXT.split()
        cut = scored % len(words)
        total += overlap(words[cut:] + words[:cut], words)
        scored += 1
    return total


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        loss = model(torch.randn(4, 16)).pow(2).mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()
        if step == 15:
            if dist.get_rank() == 0:
                score(PAUSE)
            dist.barrier()
    print("RESULT", dist.get_rank(), repr(loss.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
