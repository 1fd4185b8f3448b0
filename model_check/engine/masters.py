"""The fp32 master of every weight, carried between layouts that keep it in one tensor and those that keep it in two.

Whole parameters on a GPU are bf16 with the low half beside them (see split_adamw); shards are fp32. Copying one into
the other would round every weight to bf16, and with it lose the small steps of the last part of a training.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from model_check.checkpoint.manifest import Manifest
from model_check.checkpoint.shards import read_tensor
from model_check.checkpoint.weight_files import clean_name
from model_check.engine.split_adamw import master_of, store_master
from model_check.models.distribute import fill


@torch.no_grad()
def carry_masters(folder: Path, manifest: Manifest, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fills the weights whose master the checkpoint keeps in another form than this rank; one tensor at a time."""
    for held_as, parameter in model.named_parameters():
        name = clean_name(held_as)
        stored, stored_low = manifest.tensors.get(f"model.{name}"), manifest.tensors.get(f"optimizer.{name}.low")
        low = optimizer.state[parameter].get("low") if parameter in optimizer.state else None
        if stored is None or (stored_low is None) == (low is None):
            continue
        whole = read_tensor(folder, stored)
        if stored_low is not None:
            fill(parameter, master_of(whole, read_tensor(folder, stored_low)))
        elif low is not None and whole.dtype == torch.float32:
            store_master(whole.to(parameter.device), parameter, low)
