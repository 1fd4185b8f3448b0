"""Cross-entropy on a GPU: one program per row, logits read twice and overwritten with their gradient.

Imported only where triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_COLUMNS = 8192
_COLUMNS_PER_WARP = 512


def cross_entropy_in_place(logits: Tensor, labels: Tensor, ignored: int, scale: Tensor, wants_gradient: bool) -> Tensor:
    """Loss of each row of [rows, vocabulary] logits, float32.

    With `wants_gradient` the logits are overwritten with `scale` times the gradient of the row's loss. `scale` stays on
    the device: the host need not know it. A row whose label is `ignored` has loss and gradient 0; one whose label lies
    outside the vocabulary has loss NaN.
    """
    assert logits.is_cuda and logits.stride(1) == 1, f"logits on {logits.device} with strides {logits.stride()}"
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    columns = min(triton.next_power_of_2(vocabulary), _MOST_COLUMNS)
    warps = max(1, min(16, columns // _COLUMNS_PER_WARP))
    with torch.cuda.device(logits.device):
        _cross_entropy_row[(rows,)](
            logits,
            logits.stride(0),
            labels.contiguous(),
            losses,
            vocabulary,
            scale.to(device=logits.device, dtype=torch.float32),
            IGNORED=ignored,
            WANTS_GRADIENT=wants_gradient,
            COLUMNS=columns,
            num_warps=warps,
        )
    return losses


@triton.jit
def _cross_entropy_row(
    logits,
    row_stride,
    labels,
    losses,
    vocabulary,
    scale,
    IGNORED: tl.constexpr,
    WANTS_GRADIENT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # 16384 rows of 128256 columns pass 2**31: the offset needs 64 bits.
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    label = tl.load(labels + row)
    # Read before the first reduction, whose barrier orders it before any other thread overwrites the value.
    in_vocabulary = (label >= 0) & (label < vocabulary)
    label_logit = tl.load(logits + label, mask=in_vocabulary, other=float("nan")).to(tl.float32)

    maximum = float("-inf")
    total = 0.0
    for start in range(0, vocabulary, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        score = tl.load(logits + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(score, axis=0))
        total = total * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(score - new_maximum), axis=0)
        maximum = new_maximum
    log_total = maximum + tl.log(total)

    is_ignored = label == IGNORED
    tl.store(losses + row, tl.where(is_ignored, 0.0, log_total - label_logit))
    if WANTS_GRADIENT:
        factor = tl.load(scale)
        for start in range(0, vocabulary, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            score = tl.load(logits + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
            gradient = (tl.exp(score - log_total) - tl.where(column == label, 1.0, 0.0)) * factor
            tl.store(logits + column, tl.where(is_ignored, 0.0, gradient), mask=column < vocabulary)


_SCALE_BLOCK = 8192


def scale_in_place(values: Tensor, scale: Tensor) -> None:
    """values *= scale, formed in float32; nothing is read or written where the scale is 1."""
    assert values.is_contiguous(), f"values with strides {values.stride()}"
    blocks = triton.cdiv(values.numel(), _SCALE_BLOCK)
    with torch.cuda.device(values.device):
        _scale_unless_one[(blocks,)](values, scale, values.numel(), BLOCK=_SCALE_BLOCK, num_warps=8)


@triton.jit
def _scale_unless_one(values, scale, count, BLOCK: tl.constexpr):
    factor = tl.load(scale)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        scaled = tl.load(values + at, mask=inside).to(tl.float32) * factor
        tl.store(values + at, scaled, mask=inside)
