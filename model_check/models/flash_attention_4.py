"""FlashAttention 4 as two operators that torch.compile can see through.

The package compiles its kernels at run time, which Dynamo cannot trace; an operator with a stated output shape needs
no tracing. Imported only where `flash-attn-4` is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("model_check::flash_attention_4", mutates_args=(), device_types="cuda")
def _forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    output, log_totals, *_ = _flash_attn_fwd(query, key, value, causal=True, return_lse=True)
    return output, log_totals


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = query.shape
    return torch.empty_like(query), query.new_empty((batch, heads, length), dtype=torch.float32)


@torch.library.custom_op("model_check::flash_attention_4_backward", mutates_args=(), device_types="cuda")
def _backward(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, grad: Tensor, log_totals: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    found: tuple[Tensor, Tensor, Tensor] = _flash_attn_bwd(
        query, key, value, output, grad, log_totals, causal=True, deterministic=True
    )
    return found


@_backward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, grad: Tensor, log_totals: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, output, log_totals = ctx.saved_tensors
    found: tuple[Tensor, Tensor, Tensor] = _backward(query, key, value, output, grad.contiguous(), log_totals)
    return found


_forward.register_autograd(_differentiate, setup_context=_keep)


def flash_attention_4(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention over [batch, length, heads, head_dim]; fewer key and value heads are shared."""
    output: Tensor = _forward(query.contiguous(), key.contiguous(), value.contiguous())[0]
    return output
