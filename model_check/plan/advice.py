"""The nearest configuration that fits, as values to set; and, where none does, from how many GPUs on one would.
For the day when a run did not fit after all: single changes that make it smaller, each with what it saves.

Least harm first: whatever gives the same results (strategy, cuts, recomputation, a smaller micro-batch), then smaller
optimizer states, then offloading. Among equals the fastest, and of those within a few percent the one that changes
least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from model_check.plan.memory import GIB
from model_check.plan.options import RECOMPUTATIONS, Job, Option, in_sections, unchecked

SAME_SPEED = 1.03
MOST_GPUS = 16384


@dataclass(frozen=True)
class Advice:
    """Values to set so that the run fits, dotted key to value, and the option they make."""

    changes: Mapping[str, Any]
    option: Option

    @property
    def nested(self) -> dict[str, Any]:
        """The same as sections: what a configuration file holds."""
        return in_sections(self.changes)

    @property
    def as_flags(self) -> str:
        """The same for the command line."""
        return " ".join(f"--set {key}={_text(value)}" for key, value in self.changes.items())


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def advise(
    job: Job, *, eight_bit: bool = True, host_bytes: float = math.inf, may_change: frozenset[str] | None = None
) -> Advice | None:
    """The option that fits and changes least; None where nothing does.

    eight_bit    8-bit optimizer states are possible (they need a package)
    host_bytes   memory of the host that a rank may take for what it offloads
    may_change   only these keys, the micro-batch and its number aside; None: any
    """
    for harm in _harms(job, eight_bit):
        fitting = [option for option in job.options(**harm) if option.fits and option.memory.host <= host_bytes]
        found = [Advice(changes_of(job, option), option) for option in fitting]
        if may_change is not None:
            found = [advice for advice in found if set(advice.changes) <= may_change | _MICRO_BATCH]
        if found:
            return _best(found)
    return None


_MICRO_BATCH = frozenset({"training.batch_size", "training.global_batch", "training.grad_accum_nums"})


def _harms(job: Job, eight_bit: bool) -> list[dict[str, Any]]:
    states = job.config.training.optimizer_states
    smaller = {"fp32": ["bf16", "8bit"], "bf16": ["8bit"], "8bit": []}[states]
    harms: list[dict[str, Any]] = [{}]
    harms += [{"states": state} for state in smaller if state != "8bit" or eight_bit]
    if not job.config.fsdp.cpu_offload:
        harms.append({"offloads": True})
    return harms


def _best(found: list[Advice]) -> Advice:
    fastest = min(advice.option.seconds_per_token for advice in found)

    def harm(advice: Advice) -> tuple[float, ...]:
        layout, load, seconds = advice.option.layout, advice.option.load, advice.option.seconds_per_token
        recomputed = RECOMPUTATIONS.index(load.recomputation)
        return layout.tensor * layout.pipeline, len(advice.changes), seconds, recomputed

    return min((a for a in found if a.option.seconds_per_token <= SAME_SPEED * fastest), key=harm)


def changes_of(job: Job, option: Option) -> dict[str, Any]:
    """The values that turn the configuration into this option."""
    config, layout, load = job.config, option.layout, option.load
    wanted: dict[str, Any] = {
        "parallel.tensor": layout.tensor,
        "parallel.pipeline": layout.pipeline,
        "parallel.activation_checkpointing": load.recomputation,
        "training.batch_size": load.batch,
        "training.optimizer_states": load.states,
        "fsdp.cpu_offload": load.offloads,
    }
    changed = {key: value for key, value in wanted.items() if value != attrgetter(key)(config)}
    if job.gathering_of(layout, load) != layout:
        changed["fsdp.reshard"] = "off" if layout.keep_gathered else "on"
    named = config.parallel.strategy
    if named != "auto" and named != layout.strategy:
        changed["parallel.strategy"] = layout.strategy
    elif named == "auto" and job.world_size > 1 and (changed or layout.strategy != job.configured_strategy):
        # Named, for what `auto` would take depends on the machine it runs on.
        changed["parallel.strategy"] = layout.strategy
    if load.micro_batches != unchecked(config, changed).accumulation(job.world_size):
        # The global batch is kept; the number of micro-batches follows from it.
        changed["training.global_batch"] = job.global_batch
        changed["training.grad_accum_nums"] = None
    return changed


def fewest_gpus(job: Job) -> int | None:
    """The smallest power of two of GPUs on which the model fits without a change of its results."""
    # What a rank computes stays, the global batch grows with the number of ranks.
    training = {"training.batch_size": 1, "training.global_batch": None, "training.grad_accum_nums": None}
    config = job.config.with_values(training, "plan")
    gpus = 1
    while gpus <= MOST_GPUS:
        if gpus > job.world_size and any(o.fits for o in replace(job, config=config, world_size=gpus).options()):
            return gpus
        gpus *= 2
    return None


def describe_need(option: Option) -> str:
    """One clause for a person: what a rank needs of what it has."""
    memory = option.memory
    parts = sorted(memory.peak.parts.items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts[:3] if size > 0)
    return (
        f"a rank needs {memory.needed / GIB:.1f} GiB of the GPU's {option.device_bytes / GIB:.1f} "
        f"(in its {memory.peak.name}: {largest})"
    )


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
