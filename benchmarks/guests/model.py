"""The model of the guests: a few layers, about 20 ms of work a step on one core."""

from __future__ import annotations

import torch

WIDTH, BATCH = 512, 256


class Net(torch.nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.nn.functional.gelu(block(x))
        return x


def batch() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH)
