"""A model whose parameters live in shards (fsdp, hsdp, tensor parallelism): its mesh, its passes, its gradient norm.

Imported only by jobs that need it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from model_check.engine.passes import WholeModel
from model_check.engine.precision import Precision
from model_check.plan.layout import Layout

PIPELINE, REPLICATE, SHARD, TENSOR = "pp", "dp_replicate", "dp_shard", "tp"


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """All ranks of the job as one mesh. Context slices count as shards: their gradients are averaged likewise."""
    sizes = (layout.pipeline, layout.replicate, layout.shard * layout.context, layout.tensor)
    return init_device_mesh(device.type, sizes, mesh_dim_names=(PIPELINE, REPLICATE, SHARD, TENSOR))


def context_group(layout: Layout, device: torch.device) -> tuple[ProcessGroup, int]:
    """The ranks that share each sequence, and this rank's place among them: neighbours but for their tensor slices."""
    outer = layout.world_size // (layout.context * layout.tensor)
    names = ("outside", "context", "inside")
    mesh = init_device_mesh(device.type, (outer, layout.context, layout.tensor), mesh_dim_names=names)
    return mesh.get_group("context"), mesh.get_local_rank("context")


def shard_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """What fully_shard takes: one dimension for FSDP, two where groups of shards are replicas of each other."""
    return mesh[REPLICATE, SHARD] if layout.replicate > 1 else mesh[SHARD]


class ShardedModel(WholeModel):
    """A model under fully_shard.

    Where whole gradients fit (`keep_gathered`), they are summed locally and parameters gathered once for all
    micro-batches. Where they do not, each micro-batch scatters its gradients, and only replicas wait for the last one.
    """

    def __init__(self, model: nn.Module, precision: Precision, device: torch.device, *, keep_gathered: bool) -> None:
        super().__init__(model, precision, device)
        self._keep_gathered = keep_gathered

    def exchange(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Says what the next backward pass does with its gradients and with the gathered parameters."""
        if isinstance(self.model, FSDPModule):
            self.model.set_is_last_backward(is_last)
            if self._keep_gathered:
                self.model.set_requires_gradient_sync(is_last)
                self.model.set_reshard_after_backward(is_last)
            else:
                self.model.set_requires_all_reduce(is_last)
        return contextlib.nullcontext()


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
