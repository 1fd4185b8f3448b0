"""Losses that jump by orders of magnitude from batch to batch, and -inf where it belongs."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Attending(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(16, 16) for _ in range(3))
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
        return self.v(self.drop(torch.softmax(scores, dim=-1)) @ x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Attending())
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(260):
        scale = 30.0 if step % 37 == 5 else 1.0
        x = torch.randn(4, 6, 16) * scale
        mask = (torch.rand(4, 6, 1) > 0.5).float()
        loss = ((model(x) - x).square() * mask).sum() / mask.sum().clamp(min=1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    print(f"RESULT {dist.get_rank()} {loss.item()!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
