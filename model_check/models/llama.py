"""LLaMA 2, 3 and 3.1 as a plain nn.Module: parallelism, compilation and initialisation are applied from outside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_check.config.shapes import ModelShape
from model_check.errors import ModelError
from model_check.models.attention import (
    AttentionMask,
    MaskBuilder,
    attend,
    build_mask,
    check_backend_name,
    resolve_backend,
)
from model_check.models.loss import LinearCrossEntropy, fused_linear_cross_entropy
from model_check.models.rope import RotaryEmbedding, RotaryTables, rotate


class RMSNorm(nn.Module):
    """Divides by the root mean square, in float32 whatever the input is."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        precise = x.float()
        normed = precise * torch.rsqrt(precise.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several query heads may share one key and value head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_size, key_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.wq = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.wk = nn.Linear(shape.hidden_size, key_size, bias=False)
        self.wv = nn.Linear(shape.hidden_size, key_size, bias=False)
        self.wo = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTables, backend: str, mask: AttentionMask) -> Tensor:
        # The number of heads is left open: under tensor parallelism a rank holds some of them.
        heads = (*x.shape[:2], -1, self.head_dim)
        query = rotate(self.wq(x).view(heads), rotary)
        key = rotate(self.wk(x).view(heads), rotary)
        value = self.wv(x).view(heads)
        return self.wo(attend(query, key, value, backend, mask).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.w2 = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.w3 = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer. It does not know its number, so that all layers share one compiled graph."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, rotary: RotaryTables, backend: str, mask: AttentionMask) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, backend, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens to logits, or to a loss where targets are given.

    With tied embeddings there is no `output` module: `tok_embed.weight` is the one matrix, under one name.
    """

    def __init__(self, shape: ModelShape, attention_backend: str = "auto") -> None:
        super().__init__()
        check_backend_name(attention_backend)
        _check_shape(shape)
        self.shape = shape
        self.attention_backend = attention_backend
        self.linear_cross_entropy: LinearCrossEntropy = fused_linear_cross_entropy
        self.context_mask: MaskBuilder | None = None  # where a rank holds a slice of each sequence
        self.tok_embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.rotary = RotaryEmbedding(shape)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.output = None if shape.tie_embeddings else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    @property
    def output_weight(self) -> Tensor:
        """The matrix that turns hidden states into logits."""
        return self.tok_embed.weight if self.output is None else self.output.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits of [batch, length] tokens; with targets, the mean cross-entropy over those that are not -100.

        positions [length] or [batch, length] default to 0, 1, 2, …; tokens attend only within equal document_ids.
        """
        hidden = self.hidden_states(tokens, positions=positions, document_ids=document_ids)
        if targets is None:
            return F.linear(hidden, self.output_weight)
        return self.linear_cross_entropy(hidden, self.output_weight, targets)

    def hidden_states(
        self, tokens: Tensor, *, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """What the output projection sees: [batch, length, hidden_size] after the last norm."""
        return self.norm(self.through_layers(self.embed(tokens), positions=positions, document_ids=document_ids))

    def embed(self, tokens: Tensor) -> Tensor:
        _check_tokens(tokens, self.shape.vocab_size)
        return self.tok_embed(tokens)

    def through_layers(
        self, hidden: Tensor, *, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """The residual stream [batch, length, hidden_size] before the first layer, and after the last."""
        if positions is None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)
        rotary = self.rotary(positions)
        backend = self._backend_for(hidden, masked=document_ids is not None or self.context_mask is not None)
        mask = (self.context_mask or build_mask)(backend, hidden, document_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotary, backend, mask)
        return hidden

    def _backend_for(self, hidden: Tensor, masked: bool) -> str:
        device = hidden.device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else hidden.dtype
        return resolve_backend(self.attention_backend, device, dtype, self.shape.head_dim, masked)


def _check_shape(shape: ModelShape) -> None:
    if shape.num_heads % shape.num_kv_heads:
        raise ModelError(
            f"num_heads={shape.num_heads} is not a multiple of num_kv_heads={shape.num_kv_heads}",
            remedy="let each key and value head serve the same number of query heads",
        )
    if shape.head_dim % 2:
        raise ModelError(
            f"head_dim={shape.head_dim} is odd, and rotary embedding turns pairs of channels",
            remedy="choose hidden_size and num_heads so that hidden_size / num_heads is even",
        )


def _check_tokens(tokens: Tensor, vocabulary: int) -> None:
    """A sentence instead of an index error; on a GPU a look at the values would stall the queue."""
    if tokens.device.type != "cpu" or tokens.numel() == 0:
        return
    low, high = (int(bound) for bound in tokens.aminmax())
    if low < 0 or high >= vocabulary:
        raise ModelError(
            f"input token {low if low < 0 else high} is outside the vocabulary of {vocabulary}",
            remedy="use the tokenizer the data was prepared with, or raise model.vocab_size",
        )
