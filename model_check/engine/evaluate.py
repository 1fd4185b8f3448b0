"""Validation loss: the mean over the same held-out samples, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model_check.engine.place import Place
from model_check.engine.precision import Precision
from model_check.engine.step import call_model


@torch.no_grad()
def validation_loss(
    model: nn.Module, batches: Callable[[], Iterable[Any]], precision: Precision, place: Place
) -> float:
    """Mean loss over this rank's held-out batches, averaged over all ranks."""
    was_training = model.training
    model.eval()
    total = torch.zeros(2, device=place.device)
    for batch in batches():
        with precision.autocast():
            loss = call_model(model, batch)
        total += torch.stack([loss.float(), torch.ones_like(loss, dtype=torch.float32)])
    model.train(was_training)
    if place.world_size > 1:
        dist.all_reduce(total)
    return (total[0] / total[1]).item()
