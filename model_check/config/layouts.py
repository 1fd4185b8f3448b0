"""The rules on parallel.* and fsdp.*: which layouts a model and a number format allow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from model_check.config import codes
from model_check.config.resolve import base_shape
from model_check.errors import Problem, UsageError

if TYPE_CHECKING:
    from model_check.config.schema import Config

_CUT_BY_TENSOR = ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size")


def layout_problems(config: Config) -> Iterator[Problem]:
    """What is wrong with the layout whatever the number of ranks."""
    for rule in (_shape_problems, _context_problems, _format_problems, _strategy_problems, _state_problems):
        yield from rule(config)


def shard_problems(config: Config, data_parallel: int) -> Iterator[Problem]:
    """What is wrong with the groups of hsdp once the number of ranks is known."""
    group = config.parallel.shard
    if config.parallel.strategy != "hsdp" or group is None or data_parallel % group == 0:
        return
    yield Problem(
        codes.SHARD_NOT_DIVISIBLE,
        "parallel.shard",
        f"{data_parallel} data-parallel ranks are not divisible by parallel.shard={group}",
        "set parallel.shard to a divisor of them, or to null for the ranks of one host",
    )


def _size(config: Config, name: str) -> Any:
    """A size of the model, as far as the configuration alone knows it."""
    explicit = getattr(config.model, name)
    if explicit is not None:
        return explicit
    try:
        base = base_shape(config.model.model_path)
    except UsageError:
        return None  # another rule says what is wrong with the path
    return getattr(base, name) if base is not None else None


def _shape_problems(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    layers = _size(config, "num_layers")
    if layers is not None and parallel.pipeline > layers:
        yield Problem(
            codes.PIPELINE_TOO_DEEP,
            "parallel.pipeline",
            f"parallel.pipeline={parallel.pipeline} stages cannot share model.num_layers={layers}",
            f"lower it to {layers} or less",
        )
    if parallel.pipeline > 1 and _size(config, "tie_embeddings"):
        yield Problem(
            codes.PIPELINE_TOO_DEEP,
            "parallel.pipeline",
            f"parallel.pipeline={parallel.pipeline} would put the tied embedding on the first and the last stage",
            "set model.tie_embeddings to false, or parallel.pipeline to 1",
        )
    for name in _CUT_BY_TENSOR:
        size = _size(config, name)
        if size is not None and size % parallel.tensor:
            yield Problem(
                codes.TENSOR_NOT_DIVISIBLE,
                "parallel.tensor",
                f"model.{name}={size} cannot be cut over parallel.tensor={parallel.tensor} ranks",
                "set parallel.tensor to a common divisor of heads, MLP width and vocabulary",
            )


def _context_problems(config: Config) -> Iterator[Problem]:
    slices, length = config.parallel.context, config.training.context_length
    if slices == 1:
        return
    if length % (2 * slices):
        yield Problem(
            codes.CONTEXT_NOT_DIVISIBLE,
            "parallel.context",
            f"training.context_length={length} cannot be cut into the {2 * slices} pieces of parallel.context={slices}",
            f"use a multiple of {2 * slices}",
        )
    if config.data.document_mask:
        yield Problem(
            codes.CONTEXT_NOT_DIVISIBLE,
            "parallel.context",
            f"parallel.context={slices} cannot keep documents apart across slices, but data.document_mask=true",
            "set data.document_mask to false, or parallel.context to 1",
        )
    backend = config.model.attention_backend
    if backend not in ("auto", "sdpa", "flex", "math"):
        yield Problem(
            codes.CONTEXT_NOT_DIVISIBLE,
            "model.attention_backend",
            f"model.attention_backend={backend} takes no mask, and parallel.context={slices} needs one",
            "set model.attention_backend to auto",
        )


def _format_problems(config: Config) -> Iterator[Problem]:
    parallel, precision = config.parallel, config.training.compute_precision
    if precision == "fp8" and parallel.tensor > 1:
        yield Problem(
            codes.LAYOUT_PRECISION,
            "training.precision",
            f"training.precision=fp8 scales whole matrices, and parallel.tensor={parallel.tensor} cuts them",
            "use bf16, or set parallel.tensor to 1",
        )
    splits = parallel.tensor * parallel.pipeline > 1
    if precision != "fp32" and not config.fsdp.use_mixed_precision and (splits or precision == "fp8"):
        yield Problem(
            codes.LAYOUT_PRECISION,
            "fsdp.use_mixed_precision",
            f"fsdp.use_mixed_precision=false leaves {precision} to autocast, which does not reach through stages, "
            "slices and fp8 products",
            "set it to true, or training.precision to fp32",
        )


def _strategy_problems(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.shard is not None and parallel.strategy not in ("hsdp", "auto"):
        yield Problem(
            codes.SHARD_WITHOUT_HSDP,
            "parallel.shard",
            f"parallel.shard={parallel.shard} forms groups of hsdp, but parallel.strategy={parallel.strategy}",
            "set parallel.strategy to hsdp, or parallel.shard to null",
        )
    if config.fsdp.cpu_offload and parallel.strategy == "ddp":
        yield Problem(
            codes.LAYOUT_WITHOUT_FSDP,
            "fsdp.cpu_offload",
            "fsdp.cpu_offload=true moves shards to the host, and parallel.strategy=ddp has none",
            "set parallel.strategy to fsdp or hsdp",
        )


def replica_problems(config: Config, world_size: int) -> Iterator[Problem]:
    """What needs a whole model on every rank. Where the strategy is `auto`, the ranks check what it came to."""
    cuts = _cuts(config)
    every = config.debug.verify_gradients
    held = "one rank has no peer" if world_size == 1 else f"{cuts[0]} keeps them in shards" if cuts else ""
    if every and held:
        yield Problem(
            codes.NEEDS_REPLICAS,
            "debug.verify_gradients",
            f"debug.verify_gradients={every} compares replicas, and {held}",
            "set parallel.strategy=ddp with two ranks or more, or debug.verify_gradients=0",
        )
    if config.training.oom_retry and cuts and world_size > 1:
        yield Problem(
            codes.NEEDS_REPLICAS,
            "training.oom_retry",
            f"training.oom_retry=true repeats a step on one rank alone, and {cuts[0]} keeps parameters in shards",
            "set parallel.strategy=ddp, or training.oom_retry=false and a smaller training.batch_size",
        )


def _state_problems(config: Config) -> Iterator[Problem]:
    """Moments of 8 bits are scaled in blocks of a tensor; those of a shard would say nothing to another layout."""
    cuts = _cuts(config)
    if config.training.optimizer_states != "8bit" or not cuts:
        return
    yield Problem(
        codes.STATES_NEED_WHOLE,
        "training.optimizer_states",
        f"training.optimizer_states=8bit needs whole parameters, and {cuts[0]} keeps them in shards",
        "set it to bf16, or the layout to parallel.strategy=ddp alone",
    )


def _cuts(config: Config) -> list[str]:
    """The settings that leave a rank with a part of each parameter only."""
    parallel = config.parallel
    sizes = {name: getattr(parallel, name) for name in ("tensor", "pipeline", "context")}
    cuts = [f"parallel.{name}={size}" for name, size in sizes.items() if size > 1]
    if parallel.strategy in ("fsdp", "hsdp"):
        cuts.insert(0, f"parallel.strategy={parallel.strategy}")
    elif config.fsdp.cpu_offload:
        cuts.insert(0, "fsdp.cpu_offload=true")
    return cuts
