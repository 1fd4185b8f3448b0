"""Single changes that make a run smaller, each with what it saves: for the day when a run did not fit after all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from model_check.plan.advice import Advice, changes_of
from model_check.plan.memory import GIB
from model_check.plan.options import RECOMPUTATIONS, Job, Option


@dataclass(frozen=True)
class Remedy:
    """One change, as flags, and the bytes it saves on each rank."""

    flags: str
    saves: float

    def record(self) -> dict[str, Any]:
        return {"flags": self.flags, "saves_gib": self.saves / GIB}


def remedies(job: Job, option: Option) -> list[Remedy]:
    """What makes this option smaller, the least harmful first."""
    found = []
    for smaller in _smaller(job, option):
        saved = option.memory.allocated - smaller.memory.allocated
        changes = changes_of(job, smaller)
        if smaller.load.fused_loss != option.load.fused_loss:
            changes["training.fused_loss"] = "auto"
        if saved > 0 and changes:
            found.append(Remedy(Advice(changes, smaller).as_flags, saved))
    return found


def _smaller(job: Job, option: Option) -> Iterator[Option]:
    layout, load = option.layout, option.load
    if not load.fused_loss:
        yield job.option(layout, replace(load, fused_loss=True))
    if load.batch % 2 == 0:
        yield job.option(layout, replace(load, batch=load.batch // 2, micro_batches=2 * load.micro_batches))
    for mode in RECOMPUTATIONS[RECOMPUTATIONS.index(load.recomputation) + 1 :]:
        yield job.option(layout, replace(load, recomputation=mode))
    if layout.strategy == "ddp" and layout.data_parallel > 1:
        sharded = replace(layout, strategy="fsdp", replicate=1, shard=layout.data_parallel, keep_gathered=False)
        yield job.option(sharded, load)
    if load.states == "fp32":
        yield job.option(layout, replace(load, states="bf16"))
