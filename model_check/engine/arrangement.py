"""A model, spread over the ranks as the layout says: built on the meta device, cut up, and only then filled.

The order matters: stage, tensor slices, context, fp8, recomputation, compilation, shards, memory, weights. No rank
ever holds more than its own part and one whole tensor, and the weights are the same for every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model_check.checkpoint.weight_files import open_weights
from model_check.config import Config, resolve_shape, weights_file
from model_check.engine import resume
from model_check.engine.passes import Passes, WholeModel, replicate
from model_check.engine.place import Place, join_alone
from model_check.engine.precision import Precision
from model_check.engine.step import whole_norm
from model_check.errors import UsageError
from model_check.models import Llama, apply_compile, build_meta_model, initialize, load_pretrained
from model_check.models.fp8 import apply_fp8
from model_check.models.loss import plain_linear_cross_entropy
from model_check.numerics.finite import LocalCheck, watch_replica, watch_shards
from model_check.plan.choice import choose_layout
from model_check.plan.layout import Layout


@dataclass(frozen=True)
class Arranged:
    """A model in its layout, and how its passes and its gradient norm are computed."""

    layout: Layout
    precision: Precision
    bare_model: nn.Module  # its names are those of the whole model
    model: nn.Module  # what is called: the same, or DDP around it
    passes: Passes
    norm_of: Callable[[Sequence[torch.Tensor]], torch.Tensor] = whole_norm
    local_check: LocalCheck | None = None  # None: gradients are not exchanged

    @property
    def losses_in_job(self) -> int:
        return self.layout.world_size // self.layout.pipeline


def arrange_llama(config: Config, place: Place, vocab_size: int) -> Arranged:
    """The Llama that the configuration names, with fresh or pretrained weights."""
    shape = resolve_shape(config.model, vocab_size)
    layout = _layout(config, place, shape.parameters(), shape)
    precision = _precision(config, layout, place)
    model = build_meta_model(shape, precision.parameter_dtype, config.model.attention_backend)
    if config.training.fused_loss == "off":
        model.linear_cross_entropy = plain_linear_cross_entropy
    mesh = _mesh(layout, place) if layout.shards else None
    _transform(model, config, layout, mesh, precision, place)
    if mesh is not None:
        _shard(model, config, layout, mesh, precision, place)
    _fill(model, config, layout, place)
    return _with_passes(model, config, layout, mesh, precision, place)


def arrange_module(config: Config, place: Place, model: nn.Module) -> Arranged:
    """Any module that returns a loss, with the weights it has on rank 0: replicated or sharded, never cut otherwise."""
    layout = _layout(config, place, sum(p.numel() for p in model.parameters()), None)
    if layout.splits_model or layout.context > 1:
        raise UsageError(
            f"parallel.tensor={layout.tensor}, pipeline={layout.pipeline} and context={layout.context} cut a Llama, "
            f"not a {type(model).__name__}",
            remedy="set them to 1, or train the model section of the configuration",
        )
    precision = _precision(config, layout, place)
    model = model.to(place.device)
    mesh = _mesh(layout, place) if layout.shards else None
    if mesh is not None:
        if place.world_size > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, src=0)
        _shard(model, config, layout, mesh, precision, place)
    return _with_passes(model, config, layout, mesh, precision, place)


def _layout(config: Config, place: Place, parameters: int, shape: Any) -> Layout:
    on_gpu = place.device.type == "cuda"
    return choose_layout(
        config,
        place.world_size,
        ranks_per_host=place.ranks_per_host or place.world_size,
        parameters=parameters,
        shape=shape,
        gpu_bytes=torch.cuda.get_device_properties(place.device).total_memory if on_gpu else None,
    )


def _precision(config: Config, layout: Layout, place: Place) -> Precision:
    name = config.training.compute_precision
    if not layout.shards:
        return Precision.choose(name, place.device)
    return Precision.choose_sharded(name, place.device, mixed=config.fsdp.use_mixed_precision)


def _mesh(layout: Layout, place: Place) -> Any:
    from model_check.engine.sharded import build_mesh

    if place.world_size == 1:
        join_alone(place)
    return build_mesh(layout, place.device)


def _transform(model: Llama, config: Config, layout: Layout, mesh: Any, precision: Precision, place: Place) -> None:
    if layout.pipeline > 1:
        from model_check.models.pipeline import keep_stage

        keep_stage(model, layout.stage_of(place.rank), layout.pipeline)
    if layout.tensor > 1:
        from model_check.engine.sharded import TENSOR
        from model_check.models.tensor import apply_tensor_parallel

        apply_tensor_parallel(model, mesh[TENSOR])
    if layout.context > 1:
        from model_check.engine.sharded import context_group
        from model_check.models.context import apply_context_parallel

        group, number = context_group(layout, place.device)
        apply_context_parallel(model, group, number, layout.context)
    if precision.name == "fp8":
        apply_fp8(model, place.device)
    if config.parallel.activation_checkpointing != "none":
        from model_check.models.recompute import apply_activation_checkpointing

        apply_activation_checkpointing(model, config.parallel.activation_checkpointing)
    wanted = config.training.compile
    if wanted == "on" or (wanted == "auto" and place.device.type == "cuda"):
        apply_compile(model)


def _shard(model: nn.Module, config: Config, layout: Layout, mesh: Any, precision: Precision, place: Place) -> None:
    from model_check.engine.sharded import shard_mesh
    from model_check.models.parallelize import apply_fully_shard

    apply_fully_shard(
        model,
        shard_mesh(mesh, layout),
        compute_dtype=precision.gather_dtype,
        reshard=not layout.keep_gathered,
        cpu_offload=_offloads(config, layout, place),
    )


def _offloads(config: Config, layout: Layout, place: Place) -> bool:
    """On the CPU parameters are in host memory already."""
    return layout.shards and config.fsdp.cpu_offload and place.device.type == "cuda"


def _fill(model: Llama, config: Config, layout: Layout, place: Place) -> None:
    offloads = _offloads(config, layout, place)
    model.to_empty(device="cpu" if offloads else place.device)
    if offloads:
        model.rotary.to(place.device)  # buffers are not offloaded
    initialize(model, seed=config.system.seed, init_std=config.model.init_std, draw_on=place.device)
    if config.model.init != "pretrained" or not config.model.model_path:
        return
    path = weights_file(config.model.model_path)
    if path is None:
        load_pretrained(model, config.model.model_path)
    else:
        whole = resume.model_shapes(build_meta_model(model.shape))
        resume.load_weights(model, open_weights(path), whole, remedy=resume.PRETRAINED)


def _with_passes(
    model: nn.Module, config: Config, layout: Layout, mesh: Any, precision: Precision, place: Place
) -> Arranged:
    if mesh is None:
        whole = replicate(model, place)
        check = None
        if isinstance(whole, DistributedDataParallel):
            check = watch_replica(place.device)
        return Arranged(layout, precision, model, whole, WholeModel(whole, precision, place.device), local_check=check)
    from model_check.engine.sharded import ShardedModel, ShardedNorm

    passes: Passes
    if layout.pipeline > 1:
        from model_check.engine.pipelined import PipelinedModel
        from model_check.models.pipeline import LlamaStage

        assert isinstance(model, LlamaStage), type(model)
        passes = PipelinedModel(model, mesh, precision, place.device)
    else:
        passes = ShardedModel(model, precision, place.device, keep_gathered=layout.keep_gathered)
    check = watch_shards(model, place.device) if place.world_size > 1 else None
    return Arranged(layout, precision, model, model, passes, ShardedNorm(mesh, place.device), check)
