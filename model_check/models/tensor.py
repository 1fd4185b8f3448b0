"""Tensor parallelism, applied from outside: each rank of the group holds a slice of every matrix.

Attention heads and MLP columns are cut, the products that return to the residual stream are summed. The embedding and
the output head are cut by vocabulary; the loss below never gathers the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import Embedding, Linear, Module, Parameter

from model_check.config.shapes import ModelShape
from model_check.errors import ModelError
from model_check.models.llama import Block, Llama
from model_check.models.loss import (
    HALF_PRESCALE,
    IGNORED,
    check_targets,
    compute_dtype,
    count_targets,
    rows_per_chunk,
)


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """Cut `model` over the one-dimensional `mesh`, in place; call it before fp8, compiling and sharding."""
    _check_sizes(model.shape, mesh.size())
    plan: dict[str, ParallelStyle] = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(),
    }
    for layer in model.layers:
        if isinstance(layer, Block):
            parallelize_module(layer, mesh, plan)
    if isinstance(model.tok_embed, Embedding):
        # torch's annotations deny that these functions return what they change.
        distribute_module(model.tok_embed, mesh, _cut_rows, _replicated_tokens, _summed)  # type: ignore[arg-type]
    if isinstance(model.output, Linear):
        # Its forward is never called: the loss multiplies with the weight itself.
        whole = model.output.weight
        model.output.weight = Parameter(distribute_tensor(whole, mesh, [Shard(0)]), requires_grad=whole.requires_grad)
    model.linear_cross_entropy = VocabularyParallelLoss(mesh)
    return model


def _cut_rows(name: str, module: Module, mesh: DeviceMesh) -> None:
    for key, whole in module.named_parameters(recurse=False):
        module.register_parameter(key, Parameter(distribute_tensor(whole, mesh, [Shard(0)]), whole.requires_grad))


def _replicated_tokens(module: Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(tokens, mesh, [Replicate()], run_check=False) for tokens in inputs)


def _summed(module: Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    """Waits for the sum: what RowwiseParallel hands on may still be under way, and a compiled block that is given such
    a tensor computes the right values and loses their gradient (torch 2.13)."""
    return output.redistribute(placements=[Replicate()], async_op=False).to_local()


def _check_sizes(shape: ModelShape, ranks: int) -> None:
    for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"):
        size = getattr(shape, name)
        if size % ranks:
            raise ModelError(
                f"{name}={size} cannot be cut over parallel.tensor={ranks} ranks",
                remedy=f"choose a parallel.tensor that divides {size}",
            )


class VocabularyParallelLoss:
    """Cross-entropy of an output head whose rows are cut over a group, chunk by chunk; the same on every rank of it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self._rank = mesh.get_local_rank()

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        assert isinstance(weight, DTensor), f"the output head is not cut by vocabulary but a {type(weight).__name__}"
        check_targets(targets, weight.shape[0])
        local = weight.to_local()
        first = self._rank * local.shape[0]
        divisor = count_targets(targets)
        loss: Tensor = _VocabularyParallelCrossEntropy.apply(
            hidden, local, targets, divisor, first, compute_dtype(hidden), self._group
        )
        return loss


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    """Gradients are finished in the forward pass, as in the loss of a whole vocabulary; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        divisor: Tensor,
        first: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
    ) -> Tensor:
        prescale = HALF_PRESCALE if dtype == torch.float16 else 1.0
        with torch.autocast(hidden.device.type, enabled=False):
            loss_sum, grad_hidden, grad_weight = _run_chunks(hidden, weight, targets, first, dtype, prescale, group)
        ctx.save_for_backward(grad_hidden, grad_weight, divisor * prescale)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        return loss_sum / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, divisor = ctx.saved_tensors
        scale = (grad_output.float() / divisor).reshape(1)
        hidden_dtype, weight_dtype = ctx.dtypes
        return (grad_hidden * scale).to(hidden_dtype), (grad_weight * scale).to(weight_dtype), *[None] * 5


def _run_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, first: int, dtype: torch.dtype, prescale: float, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss, and `prescale` times the gradients of that sum by the hidden states and this rank's rows."""
    rows = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    matrix = weight.to(dtype)
    labels = targets.reshape(-1)
    loss_sum = torch.zeros((), dtype=torch.float32, device=rows.device)
    grad_rows = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=rows.device)
    chunk = rows_per_chunk(labels.numel(), weight.shape[0], dtype, rows.device)
    for start in range(0, labels.shape[0], chunk):
        part = slice(start, start + chunk)
        losses, gradient = _cross_entropy_rows(rows[part] @ matrix.T, labels[part], first, group)
        loss_sum += losses.sum()
        gradient = gradient.mul_(prescale).to(dtype)
        torch.mm(gradient, matrix, out=grad_rows[part])
        grad_weight += torch.mm(gradient.T, rows[part]).float()
    dist.all_reduce(grad_rows, group=group)
    return loss_sum, grad_rows.view(hidden.shape), grad_weight


def _cross_entropy_rows(logits: Tensor, labels: Tensor, first: int, group: Any) -> tuple[Tensor, Tensor]:
    """Loss of each row over the whole vocabulary, and its gradient by this rank's columns."""
    scores = logits.float()
    largest = scores.amax(dim=1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scores -= largest
    column = (labels - first).unsqueeze(1)
    is_here = (column >= 0) & (column < scores.shape[1]) & (labels != IGNORED).unsqueeze(1)
    column = column.masked_fill(~is_here, 0)
    label_score = scores.gather(1, column).masked_fill_(~is_here, 0.0)
    gradient = scores.exp_()
    sums = torch.cat([gradient.sum(dim=1, keepdim=True), label_score], dim=1)
    dist.all_reduce(sums, group=group)
    total, label_score = sums.split(1, dim=1)
    ignored = (labels == IGNORED).unsqueeze(1)
    losses = (total.log() - label_score).masked_fill_(ignored, 0.0)
    gradient /= total
    gradient.scatter_add_(1, column, -is_here.float())
    return losses.squeeze(1), gradient.masked_fill_(ignored, 0.0)
