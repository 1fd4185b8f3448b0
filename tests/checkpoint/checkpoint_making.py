"""Checkpoints to damage, made by the real saver in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from model_check.checkpoint.peers import Peers
from model_check.checkpoint.saver import Saved, Saver


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """A few tensors of every width, an empty one and a scalar among them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.wide": torch.randn(40, 30, generator=generator),
        "model.half": torch.randn(17, generator=generator).to(torch.bfloat16),
        "model.empty": torch.zeros(0, 4),
        "optimizer.wide.step": torch.tensor(7.0),
        "optimizer.wide.low": torch.randint(-9, 9, (40, 30), generator=generator).to(torch.int16),
        "rng.0.cpu": torch.get_rng_state()[:33].clone(),
    }


class Lineage:
    """One run's saver, with what it reported."""

    def __init__(self, directory: Path, name: str = "run", **options: Any) -> None:
        self.saver = Saver(directory, Peers(), name=name, **{"background": False, **options})
        self.folder = self.saver.lineage

    def save(self, step: int, **extra: Any) -> Saved:
        self.saver.save(step, tensors(step), {"step": step, **extra})
        self.saver.wait()
        (saved,) = self.saver.poll()
        return saved
