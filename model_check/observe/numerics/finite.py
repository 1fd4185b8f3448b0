"""Are this rank's own gradients finite: asked before they are exchanged, answered on the device.

After an exchange every rank has the same NaN, and nobody knows whose it was. So the sum of each gradient is noted while
it is still this rank's own: one extra read of the gradients, queued on the device like everything else. A sum is finite
only if every number in it is, and no reduction is faster; it may also overflow, which is no healthier.
A lone rank exchanges nothing; for it the gradient norm of the step says the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class LocalCheck:
    """Notes the sum of each piece of gradient."""

    def __init__(self, pieces: int, device: torch.device) -> None:
        self._sums = torch.zeros(pieces, dtype=torch.float32, device=device)
        # Writing into memory of our own: a fresh result would be freed on one stream and read on another.
        self._places = self._sums.unbind()

    def begin(self) -> None:
        """Forgets the step before."""
        self._sums.zero_()

    def look(self, piece: int, gradient: torch.Tensor) -> None:
        torch.sum(gradient, dim=tuple(range(gradient.ndim)), dtype=torch.float32, out=self._places[piece])

    def bad(self) -> torch.Tensor:
        """1.0 on the device where some piece was not finite, else 0.0."""
        return (~torch.isfinite(self._sums).all()).float()


def watch_replica(module: nn.Module, device: torch.device, exchanging: Callable[[], bool] = lambda: True) -> LocalCheck:
    """For a module inside DDP: its gradients are this rank's own until DDP's hook, which runs after these.

    While gradients are only added up (not `exchanging`) nothing is looked at: a bad number stays in the sum.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    check = LocalCheck(len(parameters), device)
    for piece, parameter in enumerate(parameters):

        def look(param: torch.Tensor, piece: int = piece) -> None:
            if param.grad is not None and exchanging():
                check.look(piece, param.grad)

        parameter.register_post_accumulate_grad_hook(look)
    return check


def watch_shards(model: nn.Module, device: torch.device) -> LocalCheck | None:
    """For a model under fully_shard: each unit's gradients are looked at as one, on their way into the reduce-scatter.

    None where the model has no unit whose exchange can be watched.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        return None
    check = LocalCheck(len(units), device)

    class WatchedReduceScatter(DefaultReduceScatter):
        def __init__(self, piece: int) -> None:
            self._piece = piece

        def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            check.look(self._piece, input_tensor)
            return super().__call__(output_tensor, input_tensor, *args, **options)

    for piece, unit in enumerate(units):
        unit.set_custom_reduce_scatter(WatchedReduceScatter(piece))
    return check
