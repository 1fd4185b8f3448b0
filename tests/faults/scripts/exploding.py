"""A sign that is wrong: the loss has no lower bound, and its gradients grow until they leave the range of float32."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    faultclock.fired()
    for _ in range(120):
        loss = -model(torch.randn(16, 8)).abs().pow(3).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
