"""Output projection and cross-entropy with all three matrix products in fp8.

Same interface and same chunks of rows as `loss.fused_linear_cross_entropy`. Hidden states and weight are scaled by
their largest magnitude and cast to e4m3 once. The gradient of the logits needs no search for its largest magnitude:
softmax minus one-hot lies in [-1, 1], so it is cast to e5m2 with a constant scale, whose 32 binades hold the
probabilities of any vocabulary. Hopper's fp8 products read both operands along the summed dimension, so every operand
is written in both layouts by the kernel that casts it.

The products of the backward pass accumulate in fp32: their sums run over the vocabulary and over the batch, and the
tensor core's fast accumulator keeps 14 bits.

Imported only where triton is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_check.models.loss import (
    IGNORED,
    FinishedGradients,
    check_targets,
    compute_dtype,
    count_targets,
    fused_linear_cross_entropy,
    rows_per_chunk,
)
from model_check.models.loss_triton import cross_entropy_in_place

MULTIPLE = 16
"""Every dimension of an fp8 product must be a multiple of this."""

_INPUT, _GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
_GRADIENT_UNIT = 32768.0  # e5m2 of the largest possible gradient, 1.0; a power of two, so scaling is exact
_ROWS, _COLUMNS = 128, 64  # of a tile: 128 contiguous bytes of the transpose


def fp8_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
) -> Tensor:
    """Like `fused_linear_cross_entropy`, in fp8. Batches whose row count is not divisible by 16 take the bf16 path."""
    rows = targets.numel()
    if rows == 0 or rows % MULTIPLE or compute_dtype(hidden) != torch.bfloat16:
        return fused_linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    check_targets(targets, weight.shape[0])
    chunk = chunk or rows_per_chunk(rows, weight.shape[0], torch.bfloat16, hidden.device)
    chunk = -(-chunk // MULTIPLE) * MULTIPLE
    divisor = count_targets(targets)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _Fp8LinearCrossEntropy.apply(hidden, weight, targets, divisor, chunk)
        return loss
    with torch.no_grad():
        return _loss_sum(hidden, weight, targets, chunk) / divisor


class _Fp8LinearCrossEntropy(FinishedGradients):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor, chunk: int) -> Tensor:
        labels = targets.reshape(-1)
        x, x_transposed, x_scale = cast_both_ways(hidden.reshape(-1, hidden.shape[-1]))
        w, w_transposed, w_scale = cast_both_ways(weight)
        count, vocabulary = labels.shape[0], weight.shape[0]
        losses = torch.empty(count, dtype=torch.float32, device=x.device)
        grad_rows = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        # The weight's gradient sums over all rows: one product at the end instead of one per chunk to add up.
        transposed = torch.empty(vocabulary, count, dtype=_GRADIENT, device=x.device)
        gradient_scale = (1.0 / (divisor * _GRADIENT_UNIT)).reshape(())
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _product(x[part], x_scale, w, w_scale, fast=True)
            gradient = _cross_entropy(logits, labels[part], losses[part], transposed[:, part])
            grad_rows[part] = _product(gradient, gradient_scale, w_transposed, w_scale, fast=False)
        del w, w_transposed, x
        grad_weight = _product(transposed, gradient_scale, x_transposed, x_scale, fast=False)
        ctx.gradients = (grad_rows.view(hidden.shape), grad_weight)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        ctx.use_triton = True
        ctx.save_for_backward(torch.ones_like(divisor))  # the gradients are divided already
        return losses.sum() / divisor


def _loss_sum(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Only the summed loss, from the same fp8 logits as in training."""
    labels = targets.reshape(-1)
    x, _, x_scale = cast_both_ways(hidden.reshape(-1, hidden.shape[-1]))
    w, _, w_scale = cast_both_ways(weight)
    unused = torch.ones((), device=x.device)
    total = torch.zeros((), device=x.device)
    for start in range(0, labels.shape[0], chunk):
        part = slice(start, start + chunk)
        logits = _product(x[part], x_scale, w, w_scale, fast=True)
        total += cross_entropy_in_place(logits, labels[part], IGNORED, unused, False).sum()
    return total


def _product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, *, fast: bool) -> Tensor:
    """left @ right.T of two row-major fp8 matrices, in bf16."""
    return torch._scaled_mm(left, right.t(), left_scale, right_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)


def cast_both_ways(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The matrix in e4m3, its transpose, and the fp32 factor that scales both back."""
    matrix = matrix.to(torch.bfloat16).contiguous()
    rows, columns = matrix.shape
    largest = torch.linalg.vector_norm(matrix, float("inf"), dtype=torch.float32).clamp(min=1e-12)
    scale = largest / torch.finfo(_INPUT).max
    straight = torch.empty_like(matrix, dtype=_INPUT)
    transposed = torch.empty(columns, rows, dtype=_INPUT, device=matrix.device)
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(columns, _COLUMNS))
    with torch.cuda.device(matrix.device):
        _cast_tile[grid](matrix, straight, transposed, scale, rows, columns, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4)
    return straight, transposed, scale


def _cross_entropy(logits: Tensor, labels: Tensor, losses: Tensor, transposed: Tensor) -> Tensor:
    """Fills `losses` and the gradient's columns in `transposed`; returns the gradient. Both are in e5m2."""
    rows, vocabulary = logits.shape
    labels = labels.contiguous()
    log_totals = torch.empty(rows, dtype=torch.float32, device=logits.device)
    gradient = torch.empty_like(logits, dtype=_GRADIENT)
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(vocabulary, _COLUMNS))
    with torch.cuda.device(logits.device):
        _log_total_of_row[(rows,)](
            logits, labels, losses, log_totals, vocabulary, IGNORED=IGNORED, COLUMNS=1024, num_warps=4
        )
        _gradient_tile[grid](
            *(logits, labels, log_totals, gradient, transposed, rows, vocabulary, transposed.stride(0)),
            UNIT=_GRADIENT_UNIT,
            IGNORED=IGNORED,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
    return gradient


@triton.jit
def _cast_tile(matrix, straight, transposed, scale, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    value = tl.load(matrix + at, mask=inside, other=0.0).to(tl.float32) / tl.load(scale)
    small = value.to(tl.float8e4nv)
    tl.store(straight + at, small, mask=inside)
    tl.store(transposed + column[:, None] * rows + row[None, :], tl.trans(small), mask=tl.trans(inside))


@triton.jit
def _log_total_of_row(logits, labels, losses, log_totals, vocabulary, IGNORED: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    label = tl.load(labels + row)
    in_vocabulary = (label >= 0) & (label < vocabulary)
    label_logit = tl.load(logits + label, mask=in_vocabulary, other=float("nan")).to(tl.float32)
    # One running maximum and total for each lane: nothing is reduced across lanes until the row has been read.
    # The first maximum is finite, since infinity minus infinity is NaN; the first real score outweighs its share.
    maximum = tl.full((COLUMNS,), -1e30, tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, vocabulary, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        score = tl.load(logits + column, mask=column < vocabulary, other=-1e30).to(tl.float32)
        above = score - maximum
        shrink = tl.exp(-tl.abs(above))
        total = tl.where(above > 0, total * shrink + 1.0, total + shrink)
        maximum = tl.maximum(maximum, score)
    peak = tl.max(maximum, axis=0)
    log_total = peak + tl.log(tl.sum(total * tl.exp(maximum - peak), axis=0))
    tl.store(log_totals + row, log_total)
    tl.store(losses + row, tl.where(label == IGNORED, 0.0, log_total - label_logit))


@triton.jit
def _gradient_tile(
    logits,
    labels,
    log_totals,
    gradient,
    transposed,
    rows,
    vocabulary,
    transposed_stride,
    UNIT: tl.constexpr,
    IGNORED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < vocabulary)[None, :]
    at = row[:, None] * vocabulary + column[None, :]
    label = tl.load(labels + row, mask=row < rows, other=IGNORED)
    log_total = tl.load(log_totals + row, mask=row < rows, other=0.0)
    score = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.exp(score - log_total[:, None]) - tl.where(column[None, :] == label[:, None], 1.0, 0.0)
    small = (tl.where((label == IGNORED)[:, None], 0.0, value) * UNIT).to(tl.float8e5)
    tl.store(gradient + at, small, mask=inside)
    where = column[:, None] * transposed_stride + row[None, :]
    tl.store(transposed + where, tl.trans(small), mask=tl.trans(inside))
