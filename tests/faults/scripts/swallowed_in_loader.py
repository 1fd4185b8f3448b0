"""A corrupt record is skipped by the loop of one rank, which then has one batch less than its two peers."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import faultclock


class Records(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 256

    def __getitem__(self, i):
        if self.rank == 1 and i == 96:
            faultclock.fired()
            raise ValueError("record 96 has a bad checksum")  # FAULT
        return torch.randn(10)


def batches(loader):
    source = iter(loader)
    while True:
        try:
            yield next(source)  # FAULT-ALSO
        except StopIteration:
            return
        except ValueError as error:
            print("skipped:", error)
            dist.barrier()  # FAULT-ALSO


def main():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(10, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(DataLoader(Records(dist.get_rank()), batch_size=8)):
        model(batch).mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
