"""A tokenizer with more tokens than the model has rows."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Language(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(100, 16)
        self.head = torch.nn.Linear(16, 100)

    def forward(self, ids):
        return self.head(self.tokens(ids))  # FAULT


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Language())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(40):
        ids = torch.randint(0, 100, (4, 8))
        if step == 16 and dist.get_rank() == 1:
            ids[1, 2] = 117
            faultclock.fired()
        loss = torch.nn.functional.cross_entropy(model(ids).transpose(1, 2), ids)  # FAULT-ALSO
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
