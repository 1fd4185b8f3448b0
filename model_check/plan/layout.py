"""How a job's ranks are arranged, and which strategy `auto` takes: arithmetic on sizes, no torch.

Ranks are numbered from the outside in: pipeline stage, replica, shard, context slice, tensor slice. Ranks that talk
most are neighbours: a tensor group never crosses a host if its size divides the host's ranks.

The estimate is meant to tell a layout that fits from one that does not. It was fitted to a measured run: Llama-3.1-8B,
8192 tokens, one GPU, compiled blocks, 85 GiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from model_check.config import Config, ModelShape

Strategy = Literal["ddp", "fsdp", "hsdp"]

GIB = 2**30
# The allocator's fragments, the context of CUDA and the buffers of NCCL take the rest.
USABLE_SHARE = 0.9
LOGITS_BYTES = 2 * GIB


@dataclass(frozen=True)
class Layout:
    """Sizes of each kind of parallelism; their product is the number of ranks. `why` is one line for the user."""

    strategy: Strategy = "ddp"
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    keep_gathered: bool = True
    why: str = ""

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data_parallel * self.context * self.tensor

    @property
    def data_parallel(self) -> int:
        """How many ranks, or groups of ranks, see different samples."""
        return self.replicate * self.shard

    @property
    def splits_model(self) -> bool:
        """Whether a rank holds some of the layers or some of each matrix only."""
        return self.tensor * self.pipeline > 1

    @property
    def shards(self) -> bool:
        """Whether parameters live in shards. Those of a split model always do, if need be one shard each: DDP knows
        neither slices of a matrix nor stages."""
        return self.strategy != "ddp" or self.context > 1 or self.splits_model

    def describe(self) -> str:
        """One line for the user: the sizes that are not 1, and why."""
        sizes = {
            "pipeline": self.pipeline,
            "replicas": self.replicate,
            "shards": self.shard,
            "context": self.context,
            "tensor": self.tensor,
        }
        cut = " × ".join(f"{size} {name}" for name, size in sizes.items() if size > 1) or "one rank"
        return f"{self.strategy}, {cut} ({self.why})"

    def stage_of(self, rank: int) -> int:
        return rank // (self.world_size // self.pipeline)


def data_rank(config: Config, rank: int, world_size: int) -> int:
    """Which slice of every global batch this rank trains on: ranks that share a model share a slice."""
    inner = config.parallel.tensor * config.parallel.context
    return rank // inner % config.data_parallel(world_size)


def context_rank(config: Config, rank: int) -> int:
    """Which slice of every sequence this rank computes."""
    return rank // config.parallel.tensor % config.parallel.context


@dataclass(frozen=True)
class Estimate:
    """Bytes on one rank."""

    state: float
    gathered: float
    activations: float

    @property
    def total(self) -> float:
        return self.state + self.gathered + self.activations


def state_bytes_per_parameter(config: Config, *, shards: bool, on_gpu: bool) -> float:
    """Parameter, gradient, master and the two moments."""
    moments = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.1}[config.training.optimizer_states]
    half_parameters = on_gpu and config.training.compute_precision in ("bf16", "fp8") and not shards
    # bf16 parameter, bf16 gradient and the low half of the master; or all of them in fp32.
    return moments + (6.0 if half_parameters else 8.0)


def activation_bytes(shape: ModelShape, tokens: int, config: Config, layers: int) -> float:
    """What the backward pass finds of `tokens` tokens on one rank, the widths over `parallel.tensor` ranks."""
    width = {"fp32": 4}.get(config.training.compute_precision, 2)
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    kept_by_full = float(shape.hidden_size)
    everything = 2 * shape.hidden_size + (heads + 2 * shape.intermediate_size) / config.parallel.tensor
    queries = 2 * shape.num_heads * shape.head_dim
    selected = 2 * shape.hidden_size + (queries + shape.intermediate_size) / config.parallel.tensor
    kept = {"none": everything, "selective": selected, "full": kept_by_full}
    per_token = kept[config.parallel.activation_checkpointing] * layers
    # The block whose backward runs is whole, whatever was kept of it.
    return tokens * width * (per_token + everything) + LOGITS_BYTES


def estimate(config: Config, layout: Layout, parameters: int, shape: ModelShape | None, *, on_gpu: bool) -> Estimate:
    """Memory of one rank under this layout; activations only where the shape is known."""
    held = parameters / (layout.tensor * layout.pipeline)
    per_parameter = state_bytes_per_parameter(config, shards=layout.shards, on_gpu=on_gpu)
    state = held * per_parameter / (layout.shard * layout.context)
    gathered = 0.0
    if layout.shards:
        width = 2 if config.fsdp.use_mixed_precision and config.training.compute_precision != "fp32" else 4
        units = (shape.num_layers / layout.pipeline) if shape and not layout.keep_gathered else 1
        # Kept gathered, a rank also sums whole gradients, in fp32; freed, two units are in flight.
        gathered = held * (width + 4) if layout.keep_gathered else 2 * held / units * (width + 4)
    activations = 0.0
    if shape is not None:
        tokens = config.training.batch_size * config.training.context_length // layout.context
        layers = -(-shape.num_layers // layout.pipeline)
        # 1F1B keeps as many micro-batches in flight as there are stages.
        activations = activation_bytes(shape, tokens, config, layers) * layout.pipeline
    return Estimate(state, gathered, activations)


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
    ranks_in_host = max(1, ranks_per_host // (parallel.tensor * parallel.context))
    group = parallel.shard or math.gcd(base.data_parallel, ranks_in_host)
    candidates: dict[Strategy, Layout] = {
        "ddp": base,
        "hsdp": replace(base, strategy="hsdp", replicate=base.data_parallel // group, shard=group),
        "fsdp": replace(base, strategy="fsdp", replicate=1, shard=base.data_parallel),
    }

    def settled(strategy: Strategy) -> Layout:
        return _with_gathering(config, candidates[strategy], parameters, shape, gpu_bytes)

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
    usable = gpu_bytes * USABLE_SHARE
    needed: dict[Strategy, float] = {}
    for strategy in candidates:
        layout = settled(strategy)
        needed[strategy] = estimate(config, layout, parameters, shape, on_gpu=True).total
        if needed[strategy] <= usable:
            return replace(layout, why=_reason(layout, needed, gpu_bytes))
    return replace(settled("fsdp"), why=_reason(candidates["fsdp"], needed, gpu_bytes))


def _with_gathering(
    config: Config, layout: Layout, parameters: int, shape: ModelShape | None, gpu_bytes: int | None
) -> Layout:
    """Gathered parameters are kept for the whole step where that fits: each gather less is time won."""
    wanted = config.fsdp.reshard
    if wanted != "auto":
        return replace(layout, keep_gathered=wanted == "off")
    if not layout.shards or gpu_bytes is None:
        return layout
    kept = estimate(config, replace(layout, keep_gathered=True), parameters, shape, on_gpu=True)
    return replace(layout, keep_gathered=kept.total <= gpu_bytes * USABLE_SHARE)


def _reason(layout: Layout, needed: dict[Strategy, float], gpu_bytes: int) -> str:
    sizes = ", ".join(f"{strategy} {bytes_ / GIB:.1f} GiB" for strategy, bytes_ in needed.items())
    fits = "" if needed[layout.strategy] <= gpu_bytes * USABLE_SHARE else ", and even that may not fit"
    return f"auto: {layout.strategy}; a rank would need {sizes} of the GPU's {gpu_bytes / GIB:.0f} GiB{fits}"
