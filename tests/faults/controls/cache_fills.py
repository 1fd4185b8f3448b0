"""A cache that fills for twelve seconds, and a data set read through a memory map: both grow, neither leaks."""

import os
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

PAUSE = float(os.environ.get("CONTROL_PAUSE", "0.04"))
SAMPLES = 300
STEPS = 800
BATCH_BYTES = 1 << 18


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(64, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    cache = {}
    with tempfile.TemporaryFile() as file:
        file.truncate(STEPS * BATCH_BYTES)
        tokens = np.memmap(file, dtype=np.uint8, mode="r")
        for step in range(STEPS):
            sample = step % SAMPLES
            if sample not in cache:
                cache[sample] = torch.randn(2048, 64)
            read = int(tokens[step * BATCH_BYTES : (step + 1) * BATCH_BYTES].sum())
            loss = (model(cache[sample]) - 1 - read).pow(2).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            time.sleep(PAUSE)
    print(f"RESULT {dist.get_rank()} {loss.item()!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
