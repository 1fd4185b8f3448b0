"""Forward and backward over micro-batches: what differs between layouts, behind one small interface.

Here: a model that is whole on every rank, alone or under DDP. `sharded` and `pipelined` have the others; they import
parts of torch that take a second to load, so a run that does not need them does not import them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model_check.blackbox.spans import span
from model_check.engine.gradient_sums import GradientSums
from model_check.engine.place import Place
from model_check.engine.precision import Precision
from model_check.errors import ModelError
from model_check.numerics.replicas import REPLICAS

ScaleLoss = Callable[[torch.Tensor], torch.Tensor]


class Passes(Protocol):
    """What a train step and an evaluation ask of a model. A rank that computes no loss returns zero."""

    computes_loss: bool

    def accumulate(self, micro_batches: Sequence[Any], scale_loss: ScaleLoss) -> torch.Tensor:
        """Gradients of the mean loss over the micro-batches and the data-parallel ranks; returns this rank's mean."""
        ...

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of one batch, without gradients."""
        ...


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
    replica = DistributedDataParallel(model, **options)
    pin_buckets(replica)
    return replica


def pin_buckets(model: DistributedDataParallel) -> None:
    """Lays out DDP's buckets once and for all, before the first step. Collective.

    DDP starts with one bucket for everything and cuts it into buckets of 25 MB after the first step, in the order in
    which gradients arrived. An all-reduce of more than two ranks adds in an order that depends on an element's place in
    its bucket, so the first step after a resume would round differently from the same step of an undisturbed run. Here
    the cutting happens before any step, in reverse order of the parameters, which is how gradients arrive but for
    neighbours inside a layer: the overlap of communication and backward is the same, and every step of every run adds
    in one order.

    One backward pass of zeros shows DDP the order; it costs one exchange of gradients.
    """
    parameters = [p for p in model.module.parameters() if p.requires_grad]
    model.reducer.prepare_for_forward()
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        # Backward walks this chain from its end: the last parameter's gradient arrives first.
        total = total + parameter.reshape(-1)[0].float() * 0
    model.reducer.prepare_for_backward([])
    total.backward()
    if not model.reducer._rebuild_buckets():
        raise AssertionError("DDP did not lay out its buckets after a backward pass")
    for parameter in parameters:
        parameter.grad = None


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


def document_arguments(batch: Any) -> dict[str, torch.Tensor]:
    """Positions that do not just count up, and what keeps packed documents apart, where a batch carries them."""
    named = {"positions": batch.positions, "document_ids": batch.document_ids}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def call_model(model: nn.Module, batch: Any) -> torch.Tensor:
    """A batch of our loader goes in as (tokens, targets); a dict as keywords; a tuple as positions."""
    if isinstance(batch, dict):
        return loss_of(model(**batch))
    if isinstance(batch, (tuple, list)):
        return loss_of(model(*batch))
    if hasattr(batch, "tokens"):
        return loss_of(model(batch.tokens, batch.targets, **document_arguments(batch)))
    return loss_of(model(batch))


def _forward_span(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """A rank that was started cold has it from the wrapped call of every module.

    A warm one has imported the compiler before it was a rank, and the compiler must find that call as torch wrote it.
    """
    if hasattr(nn.Module.__call__, "__wrapped__"):
        return contextlib.nullcontext()
    return span("forward", type(model).__name__)


class WholeModel:
    """A model whose forward pass runs on one rank. Ranks exchange gradients once, in the last backward."""

    computes_loss = True

    def __init__(self, model: nn.Module, precision: Precision, device: torch.device) -> None:
        self.model = model
        self._precision = precision
        self._device = device
        self._sums = GradientSums(model)

    def accumulate(self, micro_batches: Sequence[Any], scale_loss: ScaleLoss) -> torch.Tensor:
        total = torch.zeros((), device=self._device)
        share = 1.0 / len(micro_batches)
        REPLICAS.step_begins(self.model, micro_batches[0])
        with self._sums.over(len(micro_batches)):
            for index, batch in enumerate(micro_batches):
                with self.exchange(is_last=index == len(micro_batches) - 1):
                    with self._precision.autocast(), _forward_span(self.model):
                        loss = call_model(self.model, batch)
                        if share != 1.0:
                            loss = loss * share
                    scale_loss(loss).backward()
                total += loss.detach().float()
        return total

    @torch.no_grad()
    def loss(self, batch: Any) -> torch.Tensor:
        with self._precision.autocast():
            return call_model(self.model, batch)

    def exchange(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around each forward and backward: gradients travel in the last one."""
        if is_last or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.model.no_sync()
