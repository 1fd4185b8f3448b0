"""Rotary position embedding, with the frequency scaling of Llama 3.1.

Pairs are (i, i + head_dim/2), as in Hugging Face checkpoints ("rotate half"), so weights move in and out unpermuted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model_check.config.shapes import ModelShape, RopeScaling


class RotaryTables(NamedTuple):
    """Cosines and sines in float32, [batch or 1, length, 1, head_dim / 2]: they broadcast over the heads."""

    cosine: Tensor
    sine: Tensor


class RotaryEmbedding(nn.Module):
    """Turns positions into rotary tables.

    The frequencies are rebuilt after every move or cast of the module: `to_empty` would leave garbage in them, and
    `.to(torch.bfloat16)` would round them so far that distant positions collide.
    """

    frequencies: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("frequencies", inverse_frequencies(shape), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        self.frequencies = inverse_frequencies(self.shape).to(self.frequencies.device)
        return self

    def forward(self, positions: Tensor) -> RotaryTables:
        """Tables for positions of shape [length] or [batch, length]."""
        angles = positions.float().unsqueeze(-1) * self.frequencies
        angles = angles.view(-1, positions.shape[-1], 1, self.frequencies.shape[0])
        return RotaryTables(angles.cos(), angles.sin())


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """Radians per position of each pair of channels: [head_dim / 2], float32, on the CPU."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device="cpu") / shape.head_dim
    frequencies = 1.0 / shape.rope_theta**exponents
    if shape.rope_scaling is None:
        return frequencies
    return _scale_frequencies(frequencies, shape.rope_scaling)


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    turns_in_original_context = scaling.original_max_position * frequencies / (2 * math.pi)
    kept = (turns_in_original_context - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rotate(heads: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate [batch, length, heads, head_dim] by its positions, in the dtype of `heads`."""
    cosine, sine = tables.cosine.to(heads.dtype), tables.sine.to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
