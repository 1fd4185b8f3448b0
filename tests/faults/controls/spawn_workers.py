"""DataLoader workers started with spawn."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Numbers(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, i):
        return torch.full((4,), i / 160)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Numbers()
    loader = DataLoader(
        data, batch_size=8, sampler=DistributedSampler(data), num_workers=1, multiprocessing_context="spawn"
    )
    model = DDP(torch.nn.Linear(4, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        loss = model(x).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
    print("RESULT", dist.get_rank(), repr(loss.item()))
    dist.destroy_process_group()
