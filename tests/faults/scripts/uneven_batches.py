"""One rank's files hold fewer batches, which it takes from a list; its DDP peers wait for its gradients."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def batches_of(rank):
    return [torch.randn(8, 32) for _ in range(30 if rank else 22)]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in batches_of(rank):  # FAULT
        loss = model(x).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    if rank == 0:
        faultclock.fired()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
