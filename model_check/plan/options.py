"""Every sensible way to run a configuration on a number of GPUs, with its memory and its speed.

All options keep the global batch, so that they train the same model: a smaller micro-batch is made up for by more of
them in a step. Where parameters live, how matrices and layers are cut and what is recomputed change no result either.
Smaller optimizer states do change it a little, offloading makes a step slow: they are offered last.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from model_check.config import Config, ModelShape
from model_check.config.layouts import layout_problems, replica_problems
from model_check.plan.choice import candidate_layouts, choose_layout, with_gathering
from model_check.plan.devices import Device
from model_check.plan.layout import Layout, Strategy
from model_check.plan.memory import MemoryPlan, plan_memory
from model_check.plan.speed import GPUS_PER_HOST, SpeedPlan, plan_speed
from model_check.plan.workload import Recomputation, Workload, workload_of

RECOMPUTATIONS: tuple[Recomputation, ...] = ("none", "selective", "full")
_TENSOR_SIZES = (1, 2, 4, 8)
_PIPELINE_SIZES = (1, 2, 4, 8, 16)
LARGEST_BATCH = 4096


def in_sections(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Values by dotted key, as the sections that a configuration file has."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return sections


def unchecked(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy with these dotted keys changed; no rule has been asked about it."""
    changed = in_sections(values).items()
    return config.model_copy(update={name: getattr(config, name).model_copy(update=part) for name, part in changed})


@dataclass(frozen=True)
class Option:
    """One way to run: what is cut how, what a rank then needs, and how long a step takes (None: rates unknown)."""

    layout: Layout
    load: Workload
    memory: MemoryPlan
    speed: SpeedPlan | None
    device_bytes: int

    @property
    def fits(self) -> bool:
        return self.memory.fits(self.device_bytes)

    @property
    def seconds_per_token(self) -> float:
        return 1.0 / self.speed.tokens_per_s if self.speed is not None else math.inf


@dataclass(frozen=True)
class Job:
    """What is to be planned: a model, a configuration, and the machine it shall run on."""

    config: Config
    shape: ModelShape
    world_size: int
    device: Device
    gpus_per_host: int = GPUS_PER_HOST

    @property
    def global_batch(self) -> int:
        """Sequences a step over all ranks, as the configuration has them."""
        config = self.config
        per_rank = config.training.batch_size * config.accumulation(self.world_size)
        return per_rank * config.data_parallel(self.world_size)

    def option(self, layout: Layout, load: Workload) -> Option:
        memory = plan_memory(self.shape, load, layout)
        speed = plan_speed(self.shape, load, layout, self.device, gpus_per_host=self.gpus_per_host)
        return Option(layout, load, memory, speed, self.device.memory_bytes)

    def as_configured(self) -> Option:
        """The configuration as it stands, `auto` resolved."""
        layout = choose_layout(
            self.config,
            self.world_size,
            ranks_per_host=self.gpus_per_host,
            parameters=self.shape.parameters(),
            shape=self.shape,
            gpu_bytes=self.device.memory_bytes,
        )
        return self.option(layout, workload_of(self.config, self.world_size))

    @cached_property
    def configured_strategy(self) -> Strategy:
        """What `auto` comes to here, or what is named."""
        return self.as_configured().layout.strategy

    def options(self, **changed: Any) -> list[Option]:
        """Every strategy, cut and recomputation at this micro-batch or, where that is too much, a smaller one."""
        load = replace(workload_of(self.config, self.world_size), **changed)
        return [
            option
            for layout in self._layouts(load)
            if self._allowed(layout, load)
            for recomputation in RECOMPUTATIONS
            for option in self._gatherings(layout, replace(load, recomputation=recomputation))
        ]

    def gathering_of(self, layout: Layout, load: Workload) -> Layout:
        """The layout with gathered parameters kept or freed as training would have it: at this load, on this device."""

        def memory_of(kept: Layout) -> MemoryPlan:
            return plan_memory(self.shape, load, kept)

        return with_gathering(self.config.fsdp.reshard, layout, memory_of, self.device.memory_bytes)

    def largest_batch(self, option: Option) -> int:
        """The largest micro-batch that fits, whatever the global batch becomes; 0 where not even one sequence does."""

        settles_itself = self.gathering_of(option.layout, option.load) == option.layout

        def fits(batch: int) -> bool:
            load = replace(option.load, batch=batch)
            layout = self.gathering_of(option.layout, load) if settles_itself else option.layout
            return plan_memory(self.shape, load, layout).fits(self.device.memory_bytes)

        return bisect_left(range(1, LARGEST_BATCH + 1), True, key=lambda batch: not fits(batch))

    def _layouts(self, load: Workload) -> Iterator[Layout]:
        for tensor, pipeline in self._cuts():
            context = self.config.parallel.context
            copies = self.world_size // (tensor * pipeline * context)
            base = Layout(pipeline=pipeline, tensor=tensor, context=context, replicate=copies, why="plan")
            yield from self._strategies(base, load)

    def _allowed(self, layout: Layout, load: Workload) -> bool:
        """The rules of the configuration have nothing against it: whatever is offered can be pasted."""
        config = self.config
        made = {
            "parallel.tensor": layout.tensor,
            "parallel.pipeline": layout.pipeline,
            "parallel.strategy": layout.strategy,
            "training.optimizer_states": load.states,
            "fsdp.cpu_offload": load.offloads,
        }
        return self._broken_rules(unchecked(config, made)) <= self._broken_rules(config)

    def _broken_rules(self, config: Config) -> set[str]:
        return {problem.code for problem in (*layout_problems(config), *replica_problems(config, self.world_size))}

    def _strategies(self, base: Layout, load: Workload) -> Iterator[Layout]:
        # A split model lives in shards whatever its strategy is called: ddp is then one shard each.
        if not load.offloads:
            yield base
        named = self.config.parallel.strategy
        candidates = candidate_layouts(base, self.config.parallel.shard, self.gpus_per_host)
        hybrid = candidates["hsdp"]
        # One group of all ranks is fsdp by another name: offered where it is what the configuration names.
        if 1 < hybrid.shard < base.data_parallel or (named == "hsdp" and 1 < hybrid.shard == base.data_parallel):
            yield hybrid
        if base.data_parallel > 1 or load.offloads or named == "fsdp":
            yield candidates["fsdp"]

    def _gatherings(self, layout: Layout, load: Workload) -> Iterator[Option]:
        """As training would gather; and with all kept where that fits, but not with the ease that `auto` asks for."""
        settled = self._best_micro_batch(layout, load, kept=False)
        if settled is not None:
            yield settled
        if layout.shards and self.config.fsdp.reshard == "auto":
            kept = self._best_micro_batch(layout, load, kept=True)
            if kept is not None and kept.fits and self.gathering_of(kept.layout, kept.load) != kept.layout:
                yield kept

    def _cuts(self) -> Iterator[tuple[int, int]]:
        """Sizes of tensor and pipeline groups that divide the model and the job; tensor groups stay in a host."""
        shape, context = self.shape, self.config.parallel.context
        for tensor in sorted({*_TENSOR_SIZES, self.config.parallel.tensor}):
            if tensor > self.gpus_per_host or any(
                size % tensor
                for size in (shape.num_heads, shape.num_kv_heads, shape.intermediate_size, shape.vocab_size)
            ):
                continue
            for pipeline in sorted({*_PIPELINE_SIZES, self.config.parallel.pipeline}):
                cut = pipeline > 1 and (shape.tie_embeddings or pipeline > shape.num_layers)
                if not cut and self.world_size % (tensor * pipeline * context) == 0:
                    yield tensor, pipeline

    def _best_micro_batch(self, layout: Layout, load: Workload, *, kept: bool) -> Option | None:
        """The micro-batch of the configuration, halved until it fits; None where the global batch cannot be kept.

        A pipeline waits less with more micro-batches: there the fastest of those that fit is taken.

        kept   gathered parameters are kept, whatever training would do
        """
        batch = load.batch
        best: Option | None = None
        while batch >= 1:
            samples = batch * layout.data_parallel
            if self.global_batch % samples == 0:
                cut = replace(load, batch=batch, micro_batches=self.global_batch // samples)
                gathers = replace(layout, keep_gathered=True) if kept else self.gathering_of(layout, cut)
                option = self.option(gathers, cut)
                if best is None or not best.fits or (option.fits and option.seconds_per_token < best.seconds_per_token):
                    best = option
                if best.fits and layout.pipeline == 1:
                    break
            batch //= 2
        return best
