"""A loader that shuffles with one seed on every rank, and no DistributedSampler."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import faultclock


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    data = TensorDataset(torch.randn(400, 16), torch.randint(0, 4, (400,)))
    model = DDP(torch.nn.Linear(16, 4))
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    faultclock.fired()
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
