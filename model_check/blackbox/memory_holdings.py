"""Whose memory is it? Parameters, gradients and optimizer states, found among the live objects of the process.

Works for any script: whatever is a Module or an Optimizer is asked what it holds. What nobody claims is activations
and temporaries. Looks at every live object, so it is for the moment when memory has run out and not for every step.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from model_check.record.events.memory import Holding

LARGEST = 10
_UNCLAIMED = Holding(category="activations and temporaries")
Where = Callable[[list[dict[str, Any]]], str]


def find_owners() -> dict[int, Holding]:
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
    owners: dict[int, Holding] = {}
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


def _claim(owners: dict[int, Holding], value: Any, category: str, name: str) -> None:
    tensor = getattr(value, "_local_tensor", value)  # what this rank holds of a sharded one
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
        return
    try:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return  # a tensor subclass without memory of its own
    if address and size:
        owners.setdefault(address, Holding(size, 1, category, name))


@dataclass(frozen=True)
class Holdings:
    """Memory by category, its largest pieces, and the holes between the blocks of torch's allocator."""

    categories: Mapping[str, int]
    largest: tuple[Holding, ...]
    free_in_pieces: int
    largest_piece: int

    @classmethod
    def of(cls, held: Collection[Holding], holes: Collection[int] = ()) -> Holdings:
        categories = Counter[str]()
        for holding in held:
            categories[holding.category] += holding.bytes
        largest = sorted(held, key=lambda holding: -holding.bytes)[:LARGEST]
        return cls(dict(categories), tuple(largest), sum(holes), max(holes, default=0))


def sum_up(segments: Iterable[Mapping[str, Any]], owners: Mapping[int, Holding], where: Where) -> Holdings:
    """A snapshot of torch's allocator. `where` names the line to show for a block's frames, innermost first."""
    groups: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    blocks = [block for segment in segments for block in segment.get("blocks", ())]
    for block in blocks:
        if block.get("state") == "active_allocated":
            owner = owners.get(int(block.get("address", 0)), _UNCLAIMED)
            line = where(list(block.get("frames") or ()))
            groups[(owner.category, line, int(block["size"]))].append(owner.name)
    found = [
        Holding(size * len(names), len(names), category, names[0] if len(set(names)) == 1 else "", line)
        for (category, line, size), names in groups.items()
    ]
    return Holdings.of(found, [int(block["size"]) for block in blocks if block.get("state") == "inactive"])
