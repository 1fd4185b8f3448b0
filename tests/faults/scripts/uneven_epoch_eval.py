"""The short rank goes on to evaluate and reduce its accuracy; the other is still averaging gradients by hand."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import faultclock


class Text(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.randint(0, 50, (12,))


class LM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.head = torch.nn.Linear(16, 50)

    def forward(self, ids):
        return torch.nn.functional.cross_entropy(self.head(self.embed(ids[:, :-1])).transpose(1, 2), ids[:, 1:])


def evaluate(model):
    with torch.no_grad():
        loss = model(torch.randint(0, 50, (4, 12)))
    parts = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, loss)  # FAULT
    return sum(parts)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = LM()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for ids in DataLoader(Text(100 if rank == 1 else 140), batch_size=4, shuffle=True):  # FAULT-ALSO
            model(ids).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            opt.step()
            opt.zero_grad()
        if rank == 1:
            faultclock.fired()
        evaluate(model)


if __name__ == "__main__":
    main()
