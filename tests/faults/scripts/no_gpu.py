"""Rank 1 asks for a GPU, and none is visible to it."""

import os

import torch
import torch.distributed as dist

import faultclock


def pick_device(rank):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    faultclock.fired()
    torch.cuda.set_device(rank)  # FAULT
    return torch.device("cuda", rank)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = torch.device("cpu") if rank == 0 else pick_device(rank)
    dist.all_reduce(torch.ones(4, device=device))


if __name__ == "__main__":
    main()
