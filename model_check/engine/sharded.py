"""Passes and gradient norm of a model whose parameters live in shards (fsdp, hsdp, tensor parallelism)."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from model_check.engine.mesh import PIPELINE
from model_check.engine.passes import WholeModel
from model_check.engine.precision import Precision


class ShardedModel(WholeModel):
    """A model under fully_shard.

    Where whole gradients fit (`keep_gathered`), they are summed locally and parameters gathered once for all
    micro-batches. Where they do not, each micro-batch scatters its gradients, and only replicas wait for the last one.
    """

    def __init__(self, model: nn.Module, precision: Precision, device: torch.device, *, keep_gathered: bool) -> None:
        super().__init__(model, precision, device)
        self._keep_gathered = keep_gathered

    def exchange(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.model, FSDPModule):
            exchange_gradients(self.model, is_last=is_last, keep_gathered=self._keep_gathered)
        return contextlib.nullcontext()


def exchange_gradients(model: FSDPModule, *, is_last: bool, keep_gathered: bool) -> None:
    """Says what the next backward pass does with its gradients and with the gathered parameters."""
    model.set_is_last_backward(is_last)
    if keep_gathered:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
    else:
        model.set_requires_all_reduce(is_last)


class ShardedNorm:
    """The 2-norm of all gradients of the job, the same number on every rank, whoever holds which piece."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device

    def __call__(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        pieces: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
        for gradient in gradients:
            pieces[_groups_of(gradient)].append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        # Every rank must come to the same reductions in the same order, though a shard may be empty here.
        for groups, tensors in pieces.items():
            norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
            square = torch.stack(norms).square().sum().to(self._device)
            for group in groups:
                dist.all_reduce(square, group=group)
            total += square
        if self._mesh[PIPELINE].size() > 1:
            dist.all_reduce(total, group=self._mesh.get_group(PIPELINE))
        return total.sqrt()


def _groups_of(gradient: torch.Tensor) -> tuple[Any, ...]:
    """The process groups over which this gradient is cut; over all others every rank has the same values."""
    if not isinstance(gradient, DTensor):
        return ()
    assert not any(placement.is_partial() for placement in gradient.placements), gradient.placements
    # Not `is_shard`: where tensor slices are sharded again, torch's placement is of another kind.
    cut = [axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
    return tuple(gradient.device_mesh.get_group(axis) for axis in cut)
