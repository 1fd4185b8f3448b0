"""The first step takes far longer than all others, as when everything is compiled."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

PAUSE = float(os.environ.get("CONTROL_PAUSE", "12"))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(16, 16))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        if step == 0:
            time.sleep(PAUSE)
        loss = model(torch.randn(4, 16)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    print("RESULT", dist.get_rank(), repr(loss.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
