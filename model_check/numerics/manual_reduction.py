"""Data parallelism written by hand: parameters whose gradients the script itself adds up over a group of ranks.

Such parameters must be the same on every rank of the group. We learn which they are from the first steps: the script
reduces each gradient directly, or all of them in flat buffers. Anything it does not reduce may differ: experts, stages,
shards, halves of a GAN. A script that makes a step without any exchange lets its ranks differ on purpose.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch

from model_check.blackbox.device_numbers import gradient_of
from model_check.blackbox.native_collectives import Exchange

LEARNED = 2  # steps
_MOST_MODULES = 16
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")

Group = tuple[int, ...]


class ByHand:
    """The exchanges that one thread of a process makes by hand."""

    def __init__(self) -> None:
        self.off = False
        self._modules: list[weakref.ref[Any]] = []
        self._shared: dict[Group, set[int]] = {}  # ids of parameters, which live as long as their module
        self._in_buffers: Counter[Group] = Counter()  # elements exchanged in flat buffers in this step
        self._exchanged = False
        self._step = 0

    def forward_seen(self, module: Any, step: int) -> None:
        """`step`: the number of steps done so far."""
        if step > self._step:
            self.off = self.off or not self._exchanged
            self._step, self._exchanged = step, False
            self._in_buffers.clear()
        if any(base.__name__ in _WRAPPERS for base in type(module).__mro__):
            self.off = True
        if not self.off and step < LEARNED and module not in self._known() and len(self._modules) < _MOST_MODULES:
            self._modules.append(weakref.ref(module))

    def exchange_begins(self, exchange: Exchange) -> None:
        """An exchange after a forward: of gradients, or of something else that is added up."""
        if self.off or not any(tensor.is_floating_point() for tensor in exchange.given):
            return
        self._exchanged = True
        if self._step >= LEARNED or not self._modules:
            return
        process_group = torch.distributed.ProcessGroup.unbox(exchange.group)
        group = tuple(torch.distributed.get_process_group_ranks(process_group))
        with_gradient = [
            (parameter, gradient)
            for module in self._known()
            for parameter in module.parameters()
            if (gradient := gradient_of(parameter)) is not None and gradient.layout is torch.strided
        ]
        places = {_place(tensor) for tensor in exchange.given if tensor.layout is torch.strided}
        reduced = [parameter for parameter, gradient in with_gradient if _place(gradient) in places]
        if not reduced:
            self._in_buffers[group] += sum(tensor.numel() for tensor in exchange.given if tensor.dim() == 1)
            if self._in_buffers[group] == sum(gradient.numel() for _, gradient in with_gradient):
                reduced = [parameter for parameter, _ in with_gradient]
        self._shared.setdefault(group, set()).update(map(id, reduced))

    def shared(self, module: Any) -> dict[Group, list[tuple[str, Any]]]:
        """The module's parameters that are equal on all ranks of a group. Names from a second module say so."""
        known = self._known()
        number = next((at for at, one in enumerate(known, start=1) if one is module), 0)
        suffix = f" of module {number}" if number > 1 else ""
        return {
            group: [(f"{name}{suffix}", p) for name, p in module.named_parameters() if id(p) in parameters]
            for group, parameters in self._shared.items()
            if number
        }

    def _known(self) -> list[Any]:
        return [module for known in self._modules if (module := known()) is not None]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
