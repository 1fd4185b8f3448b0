"""The process group gives up after 4 s; what it gives up on is a rank that still reads its files."""

import datetime
import time

import torch
import torch.distributed as dist

import faultclock


def read_shards():
    time.sleep(600)  # FAULT


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
    grad = torch.ones(16)
    for step in range(20):
        if step == 10 and dist.get_rank() == 1:
            faultclock.fired()
            read_shards()
        dist.all_reduce(grad)


if __name__ == "__main__":
    main()
