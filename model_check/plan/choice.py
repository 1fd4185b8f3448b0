"""Which layout a configuration gets on this many ranks: what it names, or what `parallel.strategy: auto` takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from model_check.config import Config, ModelShape
from model_check.config.sections import Switch
from model_check.plan.layout import Layout, Strategy
from model_check.plan.memory import GIB, MemoryPlan, plan_memory, plan_state
from model_check.plan.workload import workload_of


def estimate(config: Config, layout: Layout, parameters: int, shape: ModelShape | None) -> MemoryPlan:
    """Memory of one rank under this layout; activations only where the shape is known."""
    load = workload_of(config, layout.world_size)
    return plan_memory(shape, load, layout) if shape is not None else plan_state(parameters, load, layout)


def candidate_layouts(base: Layout, group: int | None, ranks_per_host: int) -> dict[Strategy, Layout]:
    """What each strategy makes of a layout that only replicates, the simplest first.

    group   ranks that share parameters under hsdp (parallel.shard); None: those of one host
    """
    ranks_in_host = max(1, ranks_per_host // (base.tensor * base.context))
    group = group or math.gcd(base.data_parallel, ranks_in_host)
    return {
        "ddp": base,
        "hsdp": replace(base, strategy="hsdp", replicate=base.data_parallel // group, shard=group),
        "fsdp": replace(base, strategy="fsdp", replicate=1, shard=base.data_parallel),
    }


def choose_layout(
    config: Config,
    world_size: int,
    *,
    ranks_per_host: int,
    parameters: int,
    shape: ModelShape | None = None,
    gpu_bytes: int | None = None,
) -> Layout:
    """The layout a config asks for on this many ranks. `gpu_bytes` is None on the CPU and where it is unknown."""
    parallel = config.parallel
    base = Layout(
        pipeline=parallel.pipeline,
        replicate=config.data_parallel(world_size),
        context=parallel.context,
        tensor=parallel.tensor,
    )
    candidates = candidate_layouts(base, parallel.shard, ranks_per_host)

    def settled(strategy: Strategy) -> Layout:
        def memory_of(layout: Layout) -> MemoryPlan:
            return estimate(config, layout, parameters, shape)

        return with_gathering(config.fsdp.reshard, candidates[strategy], memory_of, gpu_bytes)

    if parallel.strategy != "auto":
        return replace(settled(parallel.strategy), why=f"parallel.strategy={parallel.strategy}")
    if config.fsdp.cpu_offload:
        return replace(settled("fsdp"), why="auto: fsdp, since fsdp.cpu_offload moves shards to the host")
    if config.training.optimizer_states == "8bit":
        return replace(base, why="auto: ddp, since 8-bit optimizer states need whole parameters")
    if base.data_parallel * base.context == 1:
        return replace(base, why="auto: ddp, there is one copy of the model")
    if gpu_bytes is None:
        return replace(base, why="auto: ddp, this device has no memory of its own to run out of")
    needed: dict[Strategy, float] = {}
    for strategy, candidate in candidates.items():
        if strategy == "hsdp" and candidate.shard == base.data_parallel:
            continue  # one group of shards is what fsdp is
        layout = settled(strategy)
        plan = estimate(config, layout, parameters, shape)
        needed[strategy] = plan.needed
        if plan.fits(gpu_bytes):
            return replace(layout, why=_reason(layout, needed, gpu_bytes))
    return replace(settled("fsdp"), why=_reason(candidates["fsdp"], needed, gpu_bytes))


def with_gathering(
    reshard: Switch, layout: Layout, memory_of: Callable[[Layout], MemoryPlan], gpu_bytes: int | None
) -> Layout:
    """Gathered parameters are kept for the whole step where that fits: each gather less is time won."""
    if reshard != "auto":
        return replace(layout, keep_gathered=reshard == "off")
    if not layout.shards or gpu_bytes is None:
        return layout
    kept = replace(layout, keep_gathered=True)
    return replace(layout, keep_gathered=memory_of(kept).fits_with_ease(gpu_bytes))


def _reason(layout: Layout, needed: dict[Strategy, float], gpu_bytes: int) -> str:
    sizes = ", ".join(f"{strategy} {bytes_ / GIB:.1f} GiB" for strategy, bytes_ in needed.items())
    fits = "" if needed[layout.strategy] <= gpu_bytes else ", and even that may not fit"
    return f"auto: {layout.strategy}; a rank would need {sizes} of the GPU's {gpu_bytes / GIB:.0f} GiB{fits}"
