"""DataLoader workers, and a checkpoint that rank 0 writes."""

import torch
import torch.distributed as dist
from guestbook import STEPS
from loop import train
from model import BATCH, WIDTH, Net
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rows(Dataset):
    def __len__(self):
        return 2 * BATCH * STEPS

    def __getitem__(self, index):
        return torch.full((WIDTH,), (index * 2654435761 % 1000) / 1000)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Net())
    rows = Rows()
    batches = iter(DataLoader(rows, BATCH, sampler=DistributedSampler(rows, seed=3), num_workers=2))
    train(model, lambda: next(batches)).close(model.module.state_dict())
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
