"""Activation checkpointing, applied from outside: a block forgets what it computed and computes it again in backward.

    full        only the input of each block is kept
    selective   kept besides: the attention's output, and the products that cost more to repeat than to store

Of one 8B block, per token and in bf16: none keeps 136 KiB, selective 60, full 8; full repeats three quarters of the
forward pass, selective a third. Elementwise work (norms, rotation, SwiGLU) is always repeated: it is nearly free.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from model_check.models.attention import AttentionMask
from model_check.models.llama import Block, Llama
from model_check.models.rope import RotaryTables

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm.default, _ATEN._scaled_mm.default}
_ATTENTION = {
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}


class FullyRecomputed(Block):
    """A block that keeps its input only. `once` is what is computed, and computed again."""

    once: Any = Block.forward

    def forward(self, x: Tensor, rotary: RotaryTables, backend: str, mask: AttentionMask) -> Tensor:
        return checkpoint(self.once, x, rotary, backend, mask, use_reentrant=False)


class SelectivelyRecomputed(Block):
    """A block that keeps its input and its dear intermediate results."""

    def forward(self, x: Tensor, rotary: RotaryTables, backend: str, mask: AttentionMask) -> Tensor:
        return checkpoint(
            super().forward, x, rotary, backend, mask, use_reentrant=False, context_fn=_selective_contexts
        )


def apply_activation_checkpointing(model: Llama, mode: Literal["none", "selective", "full"]) -> Llama:
    """Make every block of `model` recompute, in place; call it before compiling and sharding."""
    kind = {"selective": SelectivelyRecomputed, "full": FullyRecomputed}.get(mode)
    if kind is not None:
        for layer in model.layers:
            if isinstance(layer, Block):
                layer.__class__ = kind
    return model


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(_Keeper())


class _Keeper:
    """Decides by the width of a product: of the MLP's two wide ones every second is repeated; one that narrows (the
    way back to the residual stream) is read by nobody in backward; one that keeps the width is kept."""

    def __init__(self) -> None:
        self._widening: dict[bool, int] = defaultdict(int)

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if self._keeps(context, op, args) else CheckpointPolicy.PREFER_RECOMPUTE

    def _keeps(self, context: Any, op: Any, args: tuple[Any, ...]) -> bool:
        if op in _ATTENTION:
            return True
        if op not in _PRODUCTS:
            return False
        width_in, width_out = args[1].shape
        if width_out <= width_in:
            return width_out == width_in
        self._widening[context.is_recompute] += 1
        return self._widening[context.is_recompute] % 2 == 1
