"""A hand-made launcher that gives one rank another learning rate; with RANK set it is the training script itself."""

import argparse
import os
import socket
import subprocess
import sys

import faultclock


def start_ranks(world):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(world):
        env = dict(
            os.environ,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        lr = "3e-4" if rank != 1 else "3e-3"
        ranks.append(subprocess.Popen([sys.executable, __file__, "--lr", lr], env=env))
    return max(r.wait() for r in ranks)


def train(lr):
    import torch
    import torch.distributed as dist

    faultclock.fired()
    dist.init_process_group("gloo")  # FAULT
    model = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(1500):
        model(torch.randn(2, 4)).sum().backward()
        dist.all_reduce(model.weight.grad)
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()
    if "RANK" in os.environ:
        train(args.lr)
    else:
        sys.exit(start_ranks(2))
