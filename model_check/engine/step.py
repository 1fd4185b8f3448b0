"""One optimizer step: forward and backward over the micro-batches, clip, update. No host synchronisation."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model_check.engine.place import Place
from model_check.engine.precision import LossScale, Precision
from model_check.errors import ModelError


@dataclass(frozen=True)
class StepTensors:
    """What a step leaves on the device, packed for one copy: loss, gradient norm, skipped, ranks asked to stop."""

    packed: torch.Tensor


def replicate(model: nn.Module, place: Place) -> nn.Module:
    """DDP around the model; a lone rank runs the model as it is."""
    if place.world_size == 1:
        return model
    # Our buffers are the same constants on every rank; torch 2.13 renamed the switch that leaves them alone.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {"gradient_as_bucket_view": True, buffers: False}
    if place.device.type == "cuda":
        options["device_ids"] = [place.device.index or 0]
    return DistributedDataParallel(model, **options)


def loss_of(output: Any) -> torch.Tensor:
    """The scalar loss in whatever a model returned: the tensor itself, `.loss`, `["loss"]`, or the first of a tuple."""
    if isinstance(output, dict):
        output = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(output).__name__
        raise ModelError(
            f"the model returned {what}, not a scalar loss", remedy="return the loss, or an object with .loss"
        )
    return loss.reshape(())


def call_model(model: nn.Module, batch: Any) -> torch.Tensor:
    """A batch of our loader goes in as (tokens, targets); a dict as keywords; a tuple as positions."""
    if isinstance(batch, dict):
        return loss_of(model(**batch))
    if isinstance(batch, (tuple, list)):
        return loss_of(model(*batch))
    if hasattr(batch, "tokens"):
        extra = {}
        if batch.document_ids is not None:
            extra = {"positions": batch.positions, "document_ids": batch.document_ids}
        return loss_of(model(batch.tokens, batch.targets, **extra))
    return loss_of(model(batch))


class TrainStep:
    """Callable: micro-batches in, StepTensors out. Holds what every step needs and nothing that changes otherwise."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        place: Place,
        *,
        max_grad_norm: float,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.precision = precision
        self.place = place
        self.max_grad_norm = max_grad_norm
        self.loss_scale = LossScale(place.device, enabled=precision.name == "fp16")
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def __call__(self, micro_batches: Sequence[Any], rate: float, *, stop_requested: bool = False) -> StepTensors:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._accumulate(micro_batches)
        norm = self._gradient_norm()
        # A non-finite gradient is non-finite on every rank after the all-reduce, so all ranks decide alike.
        skipped = (~torch.isfinite(norm)).float()
        self._update(norm, skipped)
        self.loss_scale.update(skipped)
        return StepTensors(self._pack(loss, norm, skipped, stop_requested))

    def _accumulate(self, micro_batches: Sequence[Any]) -> torch.Tensor:
        """Gradients of the mean loss; ranks exchange them once, in the backward of the last micro-batch."""
        total = torch.zeros((), device=self.place.device)
        share = 1.0 / len(micro_batches)
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            hold = (
                contextlib.nullcontext()
                if last or not isinstance(self.model, DistributedDataParallel)
                else self.model.no_sync()
            )
            with hold:
                with self.precision.autocast():
                    loss = call_model(self.model, batch)
                    if share != 1.0:
                        loss = loss * share
                self.loss_scale.apply(loss).backward()
            total += loss.detach().float()
        return total

    def _gradient_norm(self) -> torch.Tensor:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        norm = torch.linalg.vector_norm(torch.stack(norms))
        return norm / self.loss_scale.scale if self.loss_scale.enabled else norm

    def _update(self, norm: torch.Tensor, skipped: torch.Tensor) -> None:
        divisor = self.loss_scale.scale.clone()
        if self.max_grad_norm > 0:
            divisor = divisor * torch.clamp(norm / self.max_grad_norm, min=1.0)
        # The optimizers divide by grad_scale on the way in and change nothing where found_inf is 1.
        self.optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self.optimizer.step()

    def _pack(
        self, loss: torch.Tensor, norm: torch.Tensor, skipped: torch.Tensor, stop_requested: bool
    ) -> torch.Tensor:
        """One small reduction a step carries the mean loss and whether any rank was asked to stop."""
        shared = torch.stack([loss, torch.full_like(loss, float(stop_requested))])
        if self.place.world_size > 1:
            dist.all_reduce(shared)
            shared = shared / torch.tensor([self.place.world_size, 1.0], device=shared.device)
        return torch.stack([shared[0], norm, skipped, shared[1]])
