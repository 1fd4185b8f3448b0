"""Validation loss: the mean over the same held-out samples, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from model_check.blackbox.spans import span
from model_check.config import Config
from model_check.data import PackedCache
from model_check.engine.feed import context_cut, on_device, open_loader
from model_check.engine.passes import Passes
from model_check.engine.place import Place
from model_check.engine.session import Session
from model_check.errors import UsageError


def check_held_out(config: Config, world_size: int, held_out: PackedCache) -> None:
    """Ranks that share a model share their samples, so those must fill a batch of each data-parallel rank only."""
    needed = config.training.batch_size * config.data_parallel(world_size)
    available = held_out.samples(config.training.context_length)
    if available < needed:
        raise UsageError(
            f"the {available} held-out samples do not fill one batch of {needed}",
            remedy="raise data.validation_fraction or data.samples, or set training.eval_interval=0",
        )


def evaluator(session: Session) -> Callable[[int], float | None]:
    """Evaluates every eval_interval steps on the same held-out samples."""
    config, place = session.config, session.place
    held_out = session.held_out
    if not config.training.eval_interval or held_out is None:
        return lambda step: None
    check_held_out(config, place.world_size, held_out)

    def batches() -> Iterator[Any]:
        loader = open_loader(config, place, held_out, trains=False)
        feed = on_device(loader, place.device, context_cut(config, place.rank))
        try:
            for _ in range(config.training.eval_batches):
                yield next(feed)
        finally:
            loader.close()

    def evaluate(step: int) -> float | None:
        if (step + 1) % config.training.eval_interval:
            return None
        with span("eval"):
            return _validation_loss(session.train_step.model, session.train_step.passes, batches(), place)

    return evaluate


@torch.no_grad()
def _validation_loss(model: nn.Module, passes: Passes, batches: Iterable[Any], place: Place) -> float:
    """Mean loss over this rank's held-out batches, averaged over all ranks that compute one."""
    was_training = model.training
    model.eval()
    total = torch.zeros(2, device=place.device)
    for batch in batches:
        loss = passes.loss(batch)
        if passes.computes_loss:
            total += torch.stack([loss.float(), torch.ones_like(loss, dtype=torch.float32)])
    model.train(was_training)
    if place.world_size > 1:
        dist.all_reduce(total)
    return (total[0] / total[1]).item()
