"""What a failing rank can still save by itself: a local file, no collective, weights only."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


def write_error_checkpoint(directory: Path, rank: int, step: int, model: nn.Module) -> Path:
    """The rank's own parameters as `error_step_N_rank_R.pt`, written aside and renamed."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"error_step_{step}_rank_{rank}.pt"
    scratch = target.with_suffix(".tmp")
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    torch.save({"step": step, "rank": rank, "model": state}, scratch)
    scratch.replace(target)
    return target
