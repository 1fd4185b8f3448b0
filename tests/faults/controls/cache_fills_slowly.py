"""A cache that takes half a minute to fill: until it is full nobody can tell it from a leak, and then it is told."""

import os
import time

import torch

PAUSE = float(os.environ.get("CONTROL_PAUSE", "0.04"))
SAMPLES = 750


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    cache = {}
    for step in range(1200):
        sample = step % SAMPLES
        if sample not in cache:
            cache[sample] = torch.randn(2048, 64)
        loss = (model(cache[sample]) - 1).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        time.sleep(PAUSE)
    print(f"RESULT 0 {loss.item()!r}")


if __name__ == "__main__":
    main()
