"""Validation loss: the mean over the same held-out samples, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model_check.engine.passes import Passes
from model_check.engine.place import Place


@torch.no_grad()
def validation_loss(model: nn.Module, passes: Passes, batches: Callable[[], Iterable[Any]], place: Place) -> float:
    """Mean loss over this rank's held-out batches, averaged over all ranks that compute one."""
    was_training = model.training
    model.eval()
    total = torch.zeros(2, device=place.device)
    for batch in batches():
        loss = passes.loss(batch)
        if passes.computes_loss:
            total += torch.stack([loss.float(), torch.ones_like(loss, dtype=torch.float32)])
    model.train(was_training)
    if place.world_size > 1:
        dist.all_reduce(total)
    return (total[0] / total[1]).item()
