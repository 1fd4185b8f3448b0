"""FSDP2 and activation checkpointing, applied to a model from outside; names in the state dict stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from model_check.models.llama import Llama


def apply_fully_shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None,
    reshard: bool,
    cpu_offload: bool,
) -> None:
    """Shard every block of `model`, then what is left, over `mesh`. Gradients are reduced in float32, buffers stay.

    compute_dtype  parameters are gathered in this format; None: as they are stored
    reshard        gathered parameters are freed after each use instead of at the end of the step
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    for unit in _units(model):
        sharded = fully_shard(unit, reshard_after_forward=reshard, **options)
        if isinstance(unit, nn.Embedding):
            # The gradient of a lookup needs no weights: gathering them again for it would be for nothing.
            sharded.set_unshard_in_backward(False)
    # The root's parameters are needed at both ends of the step: freeing them between would only gather them twice.
    fully_shard(model, reshard_after_forward=False, **options)


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """What is gathered as one: each entry of a list of layers, and an embedding that is not the output head too."""
    if isinstance(model, Llama) and _stands_alone(model.tok_embed) and not model.shape.tie_embeddings:
        yield model.tok_embed
    inside: set[int] = set()
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        for layer in module:
            inside.update(id(part) for part in layer.modules())
            if next(layer.parameters(), None) is not None:
                yield layer


def _stands_alone(embedding: nn.Module) -> bool:
    """Not where another stage has it; nor cut by vocabulary, for it then returns a view, which hooks cannot follow."""
    return isinstance(embedding, nn.Embedding) and not isinstance(embedding.weight, DTensor)
