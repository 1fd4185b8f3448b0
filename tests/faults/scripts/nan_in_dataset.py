"""One sample of a dataset holds a NaN; loader workers fetch it in the sampler's order."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import faultclock

BAD = 237


class Rows(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        row = torch.full((16,), i / 400)
        if i == BAD:
            row[3] = float("nan")
            faultclock.fired()
        return row, i % 4


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Rows()
    sampler = DistributedSampler(data, seed=5)
    for x, y in DataLoader(data, batch_size=8, sampler=sampler, num_workers=2, persistent_workers=True):
        x = (x - 0.5) / 0.29
        loss = torch.nn.functional.cross_entropy(model(x), y)  # FAULT
        loss.backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
