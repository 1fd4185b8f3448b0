"""The checkpoint goes to a mount that accepts no bytes (a pipe without a reader)."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def save_checkpoint(model, opt, path):
    faultclock.fired()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, path)  # FAULT


def main():
    dist.init_process_group("gloo")
    path = os.path.join(tempfile.mkdtemp(), "model.pt")
    os.mkfifo(path)
    model = DDP(torch.nn.Linear(16, 16))
    opt = torch.optim.Adam(model.parameters())
    for step in range(60):
        model(torch.randn(4, 16)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
        if step == 20:
            if dist.get_rank() == 0:
                save_checkpoint(model.module, opt, path)
            dist.barrier()


if __name__ == "__main__":
    main()
