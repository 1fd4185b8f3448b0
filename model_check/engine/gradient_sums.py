"""Gradients of bf16 parameters, summed over the micro-batches of a step in fp32.

bf16 has 8 significant bits: a bf16 sum over 64 micro-batches is off by 0.8 %, one over 2,048 by 14 %. So each
micro-batch's gradient is added to an fp32 sum as soon as the backward pass produces it, and then freed. Under DDP the
sums travel with the buckets of the last micro-batch, so the ranks exchange fp32 too. One micro-batch needs no sum.

Parameters of any other format accumulate as usual in torch; FSDP itself sums in fp32 (its `reduce_dtype`).
"""

# No `from __future__` here: DDP compares the annotations of a communication hook with the classes themselves.

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


class GradientSums:
    """The fp32 sums of one model. Outside `over` it holds nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
        self._replica = model if isinstance(model, DistributedDataParallel) else None
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._open = False
        self._joins_exchange = False

    @contextlib.contextmanager
    def over(self, micro_batches: int) -> Iterator[None]:
        """Inside, gradients go into the sums; at the end each parameter's `grad` is its sum, in fp32."""
        self._expect(torch.bfloat16)
        if micro_batches == 1 or not self._parameters:
            yield
            return
        if self._replica is not None and not self._joins_exchange:
            self._replica.register_comm_hook(None, self.exchange)
            self._joins_exchange = True
        hooks = [parameter.register_post_accumulate_grad_hook(self._take) for parameter in self._parameters]
        self._open = True
        try:
            yield
            self._expect(torch.float32)
            for parameter, total in self._sums.items():
                parameter.grad = total
        finally:
            self._open = False
            self._sums.clear()
            for hook in hooks:
                hook.remove()

    def _expect(self, dtype: torch.dtype) -> None:
        """Sets the dtype that torch allows for gradients of bf16 parameters; a sum stays until the next step begins."""
        for parameter in self._parameters:
            if parameter.grad_dtype != dtype:
                parameter.grad = None
                parameter.grad_dtype = dtype

    def _take(self, parameter: torch.Tensor) -> None:
        if self._replica is not None and self._replica.require_backward_grad_sync:
            return  # `exchange` takes it from its bucket
        assert parameter.grad is not None
        self._add(parameter, parameter.grad)
        parameter.grad = None

    def _add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        total = self._sums.get(parameter)
        total = gradient.float() if total is None else total.add_(gradient)
        self._sums[parameter] = total
        return total

    def exchange(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: averages the sums, not the last micro-batch's gradients in the bucket."""
        assert self._replica is not None
        group = self._replica.process_group
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if not self._open or buffer.dtype != torch.bfloat16:
            return allreduce_hook(group, bucket)
        totals = [self._add(p, g).reshape(-1) for p, g in zip(parameters, bucket.gradients(), strict=True)]
        # A large matrix has its own bucket, and its sum is exchanged in place.
        flat = totals[0] if len(totals) == 1 else torch.cat(totals)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            self._sums[parameter] = part.view(parameter.shape)
        flat.mul_(1.0 / group.size())
        exchanged = dist.all_reduce(flat, group=group, async_op=True)
        return exchanged.get_future().then(lambda done: buffer)
