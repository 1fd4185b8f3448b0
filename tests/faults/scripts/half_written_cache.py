"""Rank 1 sees the cache file exist and reads it while rank 0 still writes it."""

import os
import tempfile
import time

import torch
import torch.distributed as dist

import faultclock


def build(path):
    tokens = torch.arange(200_000)
    torch.save(tokens, path + ".whole")
    body = open(path + ".whole", "rb").read()
    with open(path, "wb") as out:
        for start in range(0, len(body), 65536):
            out.write(body[start : start + 65536])  # FAULT-ALSO
            out.flush()
            time.sleep(0.2)


def load(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    faultclock.fired()
    return torch.load(path)  # FAULT


def main():
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "tokens.pt")
    if dist.get_rank() == 0:
        build(path)
    tokens = load(path)
    model = torch.nn.Embedding(256, 4)
    for i in range(20):
        model(tokens[i : i + 8] % 256).sum().backward()
        dist.all_reduce(model.weight.grad)


if __name__ == "__main__":
    main()
