"""Batches from the loader onto the device, ahead of the step that needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from model_check.config import Config
from model_check.data import BatchLoader, PackedCache
from model_check.data.loader import Batch
from model_check.engine.batches import mapped
from model_check.engine.place import Place
from model_check.plan.layout import context_rank, data_rank

Cut = Callable[[Any], Any]


def open_loader(config: Config, place: Place, cache: PackedCache, *, trains: bool = True) -> BatchLoader:
    """This rank's share of every global batch of the training data, or of every evaluation of held-out data."""
    return BatchLoader(
        cache,
        batch_size=config.training.batch_size,
        context_length=config.training.context_length,
        rank=data_rank(config, place.rank, place.world_size),
        world_size=config.data_parallel(place.world_size),
        seed=config.system.seed,
        grad_accum=config.accumulation(place.world_size) if trains else 1,
        num_workers=config.training.num_workers if trains else 0,
        document_mask=config.data.document_mask,
        pin_memory=place.device.type == "cuda",
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """The same structure with its tensors on the device; copies from pinned memory do not block."""
    return mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def on_device(batches: Iterable[Any], device: torch.device, cut: Cut = lambda batch: batch) -> Iterator[Any]:
    """Each batch, or the part of it that `cut` leaves, on the device."""
    for batch in batches:
        yield to_device(cut(batch), device)


def context_cut(config: Config, rank: int) -> Cut:
    """What leaves this rank its slice of every sequence; nothing is cut off where each rank computes whole ones."""
    if config.parallel.context == 1:
        return lambda batch: batch
    from model_check.models.context import slice_positions

    kept = slice_positions(config.training.context_length, context_rank(config, rank), config.parallel.context)

    def cut(batch: Batch) -> Batch:
        return replace(
            batch,
            tokens=batch.tokens[:, kept],
            targets=batch.targets[:, kept],
            positions=kept.expand(batch.tokens.shape[0], -1).contiguous(),
        )

    return cut
