"""The one device mesh of a job: (pipeline, replica, shard, tensor). Imported only by jobs that need one."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from model_check.plan.layout import Layout

PIPELINE, REPLICATE, SHARD, TENSOR = "pp", "dp_replicate", "dp_shard", "tp"


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """All ranks of the job as one mesh. Context slices count as shards: their gradients are averaged likewise."""
    sizes = (layout.pipeline, layout.replicate, layout.shard * layout.context, layout.tensor)
    return init_device_mesh(device.type, sizes, mesh_dim_names=(PIPELINE, REPLICATE, SHARD, TENSOR))


def shard_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """What fully_shard takes: one dimension for FSDP, two where groups of shards are replicas of each other."""
    return mesh[REPLICATE, SHARD] if layout.replicate > 1 else mesh[SHARD]
