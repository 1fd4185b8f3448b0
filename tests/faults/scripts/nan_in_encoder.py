"""An encoder and a head that are called separately; the encoder averages over zero tokens."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import faultclock


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)

    def forward(self, ids, mask):
        kept = self.embed(ids) * mask[..., None]
        return kept.sum(1) / mask.sum(1, keepdim=True)  # FAULT


def main():
    dist.init_process_group("gloo")
    encoder, head = DDP(Encoder()), DDP(torch.nn.Linear(16, 3))
    opt = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=1e-3)
    for step in range(60):
        ids, mask = torch.randint(0, 50, (6, 12)), torch.ones(6, 12)
        if dist.get_rank() == 1 and step == 21:
            mask[2] = 0
            faultclock.fired()
        pooled = torch.nn.functional.dropout(encoder(ids, mask), 0.1)
        loss = torch.nn.functional.cross_entropy(head(pooled), torch.randint(0, 3, (6,)))
        loss.backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
