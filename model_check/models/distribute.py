"""Whole tensors into parameters that may be sharded in any way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole` into `parameter`. Every rank has the whole one, so nothing is sent."""
    sharded: Any = parameter
    if not hasattr(sharded, "device_mesh"):
        parameter.copy_(whole)
        return
    # Imported here: a second of DTensor that a run on whole parameters does not need.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    sharded.to_local().copy_(whole[part])
