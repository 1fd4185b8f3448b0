"""Output projection and cross-entropy in one, without ever holding the logits of the whole batch.

The rows are taken in chunks. Each chunk's logits become, in place, the gradient of its loss, and are multiplied into
the gradients of the hidden states and of the weight at once: the forward pass leaves finished gradients behind, the
backward pass only scales them. Softmax and loss are computed in float32 whatever the dtype of the logits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from model_check.errors import ModelError

IGNORED = -100
LinearCrossEntropy: TypeAlias = Callable[..., Tensor]
"""(hidden, weight, targets) to the loss: any of the functions here."""

_CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
# float16 holds nothing below 6e-8: probabilities of a large vocabulary survive only if they are scaled up first.
HALF_PRESCALE = 1024.0


def plain_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The textbook path, with all logits in memory: what the fused one is compared with."""
    logits = F.linear(hidden, weight).flatten(0, -2).float()
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / count_targets(targets)


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
    kernel: Literal["auto", "triton", "torch"] = "auto",
) -> Tensor:
    """Mean of the cross-entropies of `hidden @ weight.T` over targets other than -100.

    hidden [..., width], weight [vocabulary, width], targets [...].
    `chunk` is the number of rows taken at once (None: as many as fit a fixed budget of memory).
    """
    check_targets(targets, weight.shape[0])
    dtype = compute_dtype(hidden)
    work = _Work(
        chunk=chunk or rows_per_chunk(targets.numel(), weight.shape[0], dtype, hidden.device),
        use_triton=kernel == "triton" or (kernel == "auto" and _triton_runs_on(hidden.device)),
        dtype=dtype,
    )
    divisor = count_targets(targets)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _FusedLinearCrossEntropy.apply(hidden, weight, targets, divisor, work)
        return loss
    unscaled = torch.ones_like(divisor)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        loss_sum, *_ = _run_chunks(hidden, weight, targets, work, unscaled, for_hidden=False, for_weight=False)
    return loss_sum / divisor


@dataclass(frozen=True)
class _Work:
    """How one call does its work; `dtype` is that of the matrix products."""

    chunk: int
    use_triton: bool
    dtype: torch.dtype

    @property
    def prescale(self) -> float:
        return HALF_PRESCALE if self.dtype == torch.float16 else 1.0


class FinishedGradients(torch.autograd.Function):
    """A loss whose forward pass leaves finished gradients behind; the backward pass scales them, in place, once."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the fused loss was asked for its gradients twice; it scales them in place, once")
        (divisor,) = ctx.saved_tensors
        # One element with a dimension takes part in type promotion, so the product is formed in float32 and rounded
        # once; a scalar tensor would first be rounded to bf16, which biases the whole gradient.
        scale = (grad_output.float() / divisor).reshape(1)
        scaled = tuple(
            None if gradient is None else _scaled(gradient, scale, ctx.use_triton).to(dtype)
            for gradient, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        )
        ctx.gradients = None
        return (*scaled, None, None, None)


class _FusedLinearCrossEntropy(FinishedGradients):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, divisor: Tensor, work: _Work) -> Tensor:
        for_hidden, for_weight, *_ = ctx.needs_input_grad
        # The Triton kernel divides on its way; float16 would then lose what the prescale saves, so it divides later.
        early = work.use_triton and work.prescale == 1.0
        scale = 1.0 / divisor if early else torch.full_like(divisor, work.prescale)
        with torch.autocast(hidden.device.type, enabled=False):
            loss_sum, *ctx.gradients = _run_chunks(
                hidden, weight, targets, work, scale, for_hidden=for_hidden, for_weight=for_weight
            )
        ctx.save_for_backward(torch.ones_like(divisor) if early else divisor * work.prescale)
        ctx.use_triton = work.use_triton
        ctx.dtypes = (hidden.dtype, weight.dtype)
        return loss_sum / divisor


def _scaled(gradient: Tensor, scale: Tensor, use_triton: bool) -> Tensor:
    """In place. Mostly the scale is 1, which only the device knows: the Triton kernel then touches nothing."""
    if not use_triton:
        return gradient.mul_(scale)
    from model_check.models.loss_triton import scale_in_place

    scale_in_place(gradient, scale)
    return gradient


def _run_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, work: _Work, scale: Tensor, *, for_hidden: bool, for_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The summed loss and the gradients of `scale` times that sum, where they were asked for."""
    rows = hidden.reshape(-1, hidden.shape[-1]).to(work.dtype)
    matrix = weight.to(work.dtype)
    labels = targets.reshape(-1)
    losses = torch.empty(labels.shape, dtype=torch.float32, device=rows.device)
    grad_rows = torch.empty_like(rows) if for_hidden else None
    grad_weight: Tensor | None = None
    wants_gradient = for_hidden or for_weight
    for start in range(0, labels.shape[0], work.chunk):
        part = slice(start, start + work.chunk)
        logits = rows[part] @ matrix.T
        losses[part], gradient = _cross_entropy_rows(logits, labels[part], work, scale, wants_gradient)
        if grad_rows is not None:
            torch.mm(gradient, matrix, out=grad_rows[part])
        if for_weight:
            grad_weight = _accumulate_product(grad_weight, gradient.T, rows[part], weight.dtype)
    if for_weight and grad_weight is None:
        grad_weight = torch.zeros_like(weight)
    return losses.sum(), None if grad_rows is None else grad_rows.view(hidden.shape), grad_weight


def _accumulate_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """total + left @ right, in bf16 only where the parameter itself is bf16; float16 would overflow."""
    if left.dtype == dtype and dtype != torch.float16:
        return torch.mm(left, right) if total is None else total.addmm_(left, right)
    if left.is_cuda and left.dtype != torch.float32:
        product = torch.mm(left, right, out_dtype=torch.float32)
    else:
        product = torch.mm(left.float(), right.float())
    return product if total is None else total.add_(product)


def _cross_entropy_rows(
    logits: Tensor, labels: Tensor, work: _Work, scale: Tensor, wants_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Loss of each row, and `scale` times its gradient by the logits, which are used up."""
    if work.use_triton:
        from model_check.models.loss_triton import cross_entropy_in_place

        return cross_entropy_in_place(logits, labels, IGNORED, scale, wants_gradient), logits
    ignored = labels == IGNORED
    index = labels.masked_fill(ignored, 0).unsqueeze(1)
    scores = logits.float()
    log_total = scores.logsumexp(dim=1, keepdim=True)
    losses = (log_total - scores.gather(1, index)).squeeze(1).masked_fill_(ignored, 0.0)
    if not wants_gradient:
        return losses, logits
    gradient = (scores - log_total).exp_()
    gradient.scatter_add_(1, index, torch.full_like(index, -1, dtype=torch.float32))
    gradient.masked_fill_(ignored.unsqueeze(1), 0.0)
    if work.prescale != 1.0:
        gradient.mul_(work.prescale)
    return losses, gradient.to(logits.dtype)


def compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def rows_per_chunk(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Equal chunks within the memory budget: a short last chunk would waste most of its matrix products."""
    budget = _CHUNK_BYTES.get(device.type, _CHUNK_BYTES["cpu"])
    most = max(1, budget // (vocabulary * dtype.itemsize))
    chunks = max(1, -(-rows // most))
    return max(1, -(-rows // chunks))


def count_targets(targets: Tensor) -> Tensor:
    """How many targets count, in float32: what a sum of losses is divided by."""
    return (targets != IGNORED).sum().clamp(min=1).float()


def _triton_runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def check_targets(targets: Tensor, vocabulary: int) -> None:
    """On a GPU a look at the values would stall the queue: there the kernel answers a wrong target with NaN."""
    if targets.device.type != "cpu" or targets.numel() == 0:
        return
    valid = targets[targets != IGNORED]
    if valid.numel() and (int(valid.max()) >= vocabulary or int(valid.min()) < 0):
        wrong = valid[(valid >= vocabulary) | (valid < 0)][0]
        raise ModelError(
            f"target token {int(wrong)} is outside the vocabulary of {vocabulary}",
            remedy="use the tokenizer the data was prepared with, or raise model.vocab_size",
        )
