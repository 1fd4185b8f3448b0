"""The one device mesh of a job: (pipeline, replica, shard, tensor). Imported only by jobs that need one."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
