"""Equal ranks with equal loaders, slower than a step. One loader started first; its prefetching keeps it ahead."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

PAUSE = float(os.environ.get("CONTROL_PAUSE", "0.06"))


class Samples(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 8 * 250

    def __getitem__(self, index):
        if index % 8 == 0:
            time.sleep(PAUSE)
        return torch.full((8,), float((index + self.rank) % 7))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 8))
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    if dist.get_rank() == 1:
        time.sleep(10 * PAUSE)
    for batch in DataLoader(Samples(dist.get_rank()), batch_size=8, num_workers=1):
        time.sleep(PAUSE * 0.55)  # the step itself
        loss = model(batch).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    print("RESULT", dist.get_rank(), repr(loss.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
