"""Rank 0 reads a pickled table that was cut off when it was copied; its peer waits for it."""

import os
import pickle
import tempfile

import torch.distributed as dist

import faultclock


def table():
    path = os.path.join(tempfile.mkdtemp(), "table.pkl")
    with open(path, "wb") as file:
        pickle.dump(list(range(100_000)), file)
    os.truncate(path, 50_000)
    faultclock.fired()
    with open(path, "rb") as file:
        return pickle.load(file)  # FAULT


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    table()
dist.barrier()
dist.destroy_process_group()
