"""Exceptions that the script handles on every rank alike, and harmless ones in its data code."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Flaky(Dataset):
    def __init__(self):
        self.failures = set(range(5, 160, 25))

    def __len__(self):
        return 160

    def __getitem__(self, i):
        try:
            if i in self.failures:
                raise OSError("temporary")
        except OSError:
            pass
        return torch.full((4,), float(i))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    skipped = 0
    for step, x in enumerate(DataLoader(Flaky(), batch_size=8)):
        try:
            loss = model(x if step % 7 else x[:, :3]).pow(2).mean()
        except RuntimeError:
            skipped += 1
            continue
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        opt.zero_grad()
    print("RESULT", dist.get_rank(), skipped, repr(loss.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
