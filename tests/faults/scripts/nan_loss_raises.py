"""A script that looks at its loss before `backward` and raises: its peer waits in an exchange that never comes."""

import math

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def train_step(model, opt, ids, mask):
    each = torch.nn.functional.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none")
    loss = (each * mask).sum() / mask.sum()  # FAULT
    if not math.isfinite(loss.item()):
        raise ValueError(f"loss is {loss.item()}")
    loss.backward()
    opt.step()
    opt.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(10 + dist.get_rank())
    model = DDP(torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(60):
        mask = torch.ones(4, 10)
        if step == 25 and dist.get_rank() == 1:
            mask.zero_()
            faultclock.fired()
        train_step(model, opt, torch.randint(0, 50, (4, 10)), mask)


if __name__ == "__main__":
    main()
