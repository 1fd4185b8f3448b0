"""Every rank reads the same weights file, which lost its end in a copy."""

import os
import tempfile

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import faultclock


def main():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(64, 64)
    path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    save_file(model.state_dict(), path)
    os.truncate(path, os.path.getsize(path) - 100)
    dist.barrier()
    faultclock.fired()
    model.load_state_dict(load_file(path))  # FAULT


if __name__ == "__main__":
    main()
