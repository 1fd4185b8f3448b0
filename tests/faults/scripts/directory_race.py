"""Every rank makes the output folder, and only one can be first."""

import os
import tempfile

import torch
import torch.distributed as dist

import faultclock


def prepare_output(root):
    path = os.path.join(root, "checkpoints")
    faultclock.fired()
    os.mkdir(path)  # FAULT
    return path


def main():
    dist.init_process_group("gloo")
    root = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(root, src=0)
    prepare_output(root[0])
    model = torch.nn.Linear(4, 4)
    for _ in range(50):
        model(torch.randn(2, 4)).sum().backward()
        dist.all_reduce(model.weight.grad)


if __name__ == "__main__":
    main()
