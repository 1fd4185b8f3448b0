"""Whose memory is it? Parameters, gradients and optimizer states, found among the live objects of the process.

Works for any script: whatever is a Module or an Optimizer is asked what it holds. What nobody claims is activations
and temporaries. Looks at every live object, so it is for the moment when memory has run out and not for every step.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Owner:
    """What a piece of memory is for: its category, the name of its tensor, its bytes."""

    category: str
    name: str
    bytes: int


def find_owners() -> dict[int, Owner]:
    """Address of each storage -> owner. Parameters win over whoever else refers to the same storage."""
    modules: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    for thing in gc.get_objects():
        # The type itself: asking an object for its class may run code of the script's (lazy modules, proxies).
        kind = type(thing)
        if issubclass(kind, nn.Module):
            modules.append(thing)
        elif issubclass(kind, torch.optim.Optimizer):
            optimizers.append(thing)
    owners: dict[int, Owner] = {}
    children = {id(child) for module in modules for child in module._modules.values() if child is not None}
    roots = [module for module in modules if id(module) not in children]
    for root in roots:
        for name, parameter in root.named_parameters():
            _claim(owners, parameter, "parameters", name)
            if parameter.grad is not None:
                _claim(owners, parameter.grad, "gradients", name)
        for name, buffer in root.named_buffers():
            _claim(owners, buffer, "parameters", name)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _claim(owners, parameter, "parameters", "")
                if parameter.grad is not None:
                    _claim(owners, parameter.grad, "gradients", "")
        for state in optimizer.state.values():
            for name, value in state.items() if isinstance(state, dict) else ():
                _claim(owners, value, "optimizer", str(name))
    return owners


def _claim(owners: dict[int, Owner], value: Any, category: str, name: str) -> None:
    tensor = getattr(value, "_local_tensor", value)  # what this rank holds of a sharded one
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
        return
    try:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return  # a tensor subclass without memory of its own
    if address and size:
        owners.setdefault(address, Owner(category, name, size))
