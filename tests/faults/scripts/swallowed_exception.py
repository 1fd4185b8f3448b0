"""A bad batch raises in one rank's loss; the script logs it and takes the next batch."""

import logging

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock

log = logging.getLogger("train")


def train_step(model, opt, ids):
    loss = model(ids).mean()  # FAULT-ALSO
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 8)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(80):
        ids = torch.randint(0, 100, (4, 6))
        if step == 14 and dist.get_rank() == 1:
            ids[0, 0] = 100
            faultclock.fired()
        try:
            train_step(model, opt, ids)  # FAULT
        except Exception as error:
            log.warning("skipping batch %d: %s", step, error)
            continue
        dist.broadcast(torch.ones(1), 0)  # FAULT-ALSO


if __name__ == "__main__":
    main()
