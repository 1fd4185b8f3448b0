"""torch.compile applied to a model from outside, block by block.

All blocks share one graph, so compile time does not grow with depth, and `nn.Module.compile` works in place: names in
the state dict stay as they are.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from model_check.models.llama import Block, Llama
from model_check.models.recompute import FullyRecomputed

# Training, evaluation and a last short batch each want a graph of the same block; the default limit of 8 is soon spent
# when activation checkpointing and document masks double them, and past it blocks silently run uncompiled.
_GRAPHS_PER_BLOCK = 64


def apply_compile(model: Llama, *, backend: str = "inductor", **options: Any) -> Llama:
    """Compile every block and the last norm of `model` in place; the loss has a kernel of its own."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS_PER_BLOCK)
    parts: list[nn.Module] = [*model.layers, model.norm]
    for part in parts:
        if next(part.parameters(), None) is None:
            continue  # another pipeline stage has it
        settings = {"backend": backend, "fullgraph": True, "dynamic": False, **options}
        if isinstance(part, FullyRecomputed) and _is_sliced(part):
            # A compiled recomputation would keep the mesh of the slices for backward, which is no tensor (torch 2.13).
            part.once = MethodType(torch.compile(Block.forward, **settings), part)
        else:
            part.compile(**settings)
    return model


def _is_sliced(block: Block) -> bool:
    """Whether tensor ranks share the block's matrices, each holding a slice."""
    return hasattr(block.attention.wq.weight, "device_mesh")
