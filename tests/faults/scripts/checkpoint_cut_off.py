"""Rank 0 resumes from a checkpoint truncated by a kill during its save; the others wait for its weights."""

import os
import tempfile

import torch
import torch.distributed as dist

import faultclock


def resume(model, path):
    faultclock.fired()
    model.load_state_dict(torch.load(path))  # FAULT


def main():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64)
    if dist.get_rank() == 0:
        path = os.path.join(tempfile.mkdtemp(), "last.pt")
        torch.save(model.state_dict(), path)
        os.truncate(path, os.path.getsize(path) // 2)
        resume(model, path)
    for p in model.parameters():
        dist.broadcast(p.data, 0)


if __name__ == "__main__":
    main()
