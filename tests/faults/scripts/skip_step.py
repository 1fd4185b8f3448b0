"""One rank skips the backward of a batch it does not like; its peer waits for the gradients."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(80):
        x = torch.randn(8, 16)
        if step == 15 and dist.get_rank() == 1:
            x = x * 1e6
        loss = model(x).abs().mean()
        if loss > 1e3:
            faultclock.fired()
            continue  # FAULT
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen = torch.ones(1, dtype=torch.int64)
        dist.broadcast(seen, 0)  # FAULT-ALSO
    dist.destroy_process_group()  # FAULT-ALSO


if __name__ == "__main__":
    main()
