"""Runs a step again, watched, and says where a bad number came from.

Ranks that hold the whole model replay alone, each with its own batch: nothing is exchanged, so a bad number stays with
the rank that made it. Where the model is in shards all ranks replay together, as they trained together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model_check.engine.batches import named_tensors, sample_count, samples
from model_check.engine.inputs import RandomState, StepInputs
from model_check.engine.loop import StepInfo
from model_check.engine.passes import Passes, WholeModel
from model_check.engine.step import TrainStep
from model_check.numerics.banner import BadTensor
from model_check.numerics.finite import checkable, is_finite, local_part
from model_check.numerics.origins import Origin, OriginFinder


@dataclass(frozen=True)
class Replayed:
    """What one rank saw in a replay."""

    origin: Origin | None
    loss: float
    gradients: tuple[BadTensor, ...]  # those that are not finite
    largest_gradient: float  # magnitude; infinite or NaN where one is
    own_fault: bool  # a bad number was made here, not received
    failure: str | None = None  # why there was no replay

    @classmethod
    def failed(cls, failure: Exception, info: StepInfo) -> Replayed:
        """All that is known without a replay: what the step itself said."""
        largest = math.inf if info.own_fault else 0.0
        return cls(None, info.loss, (), largest, info.own_fault, f"{type(failure).__name__}: {failure}"[:400])


class Replayer:
    """Replays steps of one train step. Nothing that training needs is left changed but the gradients."""

    def __init__(self, train_step: TrainStep, bare_model: nn.Module, shown: Callable[[str], str] = str) -> None:
        self._train_step = train_step
        self._model = bare_model
        self._shown = shown
        wrapped = train_step.model
        self.together = train_step.place.world_size > 1 and not isinstance(wrapped, DistributedDataParallel)
        self._passes: Passes = train_step.passes
        if isinstance(wrapped, DistributedDataParallel):
            self._passes = WholeModel(wrapped.module, train_step.precision, train_step.place.device)

    def replay(self, inputs: StepInputs, scale: float) -> Replayed:
        """The whole step; its gradients stay on the parameters, for the dump."""
        finder = OriginFinder(self._model, self._shown)
        named = [item for batch in inputs.micro_batches for item in named_tensors(batch)]

        def scaled(loss: torch.Tensor) -> torch.Tensor:
            finder.loss_reached(loss)
            return loss * scale if scale != 1.0 else loss

        self._train_step.begin()
        with as_it_was(self._model, inputs.random), _uncompiled(self._model), finder.watching(named):
            loss = float(self._passes.accumulate(inputs.micro_batches, scaled))
        gradients = [(name, p.grad) for name, p in self._model.named_parameters() if p.grad is not None]
        bad = tuple(bad_tensors(gradients))
        # After an exchange a bad gradient may be anybody's: it counts as ours only if a bad number was made here.
        made_here = bool(bad) and (finder.origin is not None or not self.together)
        own_fault = made_here or not math.isfinite(loss) or self._train_step.own_gradients_bad()
        return Replayed(finder.origin, loss, bad, max((_largest(g) for _, g in gradients), default=0.0), own_fault)

    def bad_rows(self, inputs: StepInputs) -> Iterator[tuple[int, int]]:
        """(micro-batch, row) of the samples whose loss is bad even alone. The gradients are left as they are."""
        for number, batch in enumerate(inputs.micro_batches):
            for row in range(sample_count(batch)):
                with as_it_was(self._model, inputs.random), _uncompiled(self._model):
                    loss = self._passes.loss(samples(batch, row, row + 1))
                if self._passes.computes_loss and not math.isfinite(float(loss)):
                    yield number, row
        if self.together:
            _reshard(self._model)


def bad_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[BadTensor]:
    """Those that are not finite, with their first values and counts."""
    for name, tensor in named:
        if checkable(tensor) and not is_finite(tensor):
            values = local_part(tensor).detach()
            bad = int((~torch.isfinite(values)).sum())
            first = values.flatten()[:5].float().tolist()
            yield BadTensor(name, tuple(tensor.shape), tuple(first), bad, values.numel())


def _largest(gradient: torch.Tensor) -> float:
    """NaN counts as infinite, so that a maximum of several keeps it."""
    values = local_part(gradient).detach()
    found = float(torch.linalg.vector_norm(values, math.inf)) if values.numel() else 0.0
    return found if math.isfinite(found) else math.inf


@contextlib.contextmanager
def as_it_was(model: nn.Module, state: RandomState) -> Iterator[None]:
    """Random numbers as the step had them, and buffers (running means) unharmed by the repetition."""
    now = RandomState.capture(state.device)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    state.restore()
    try:
        yield
    finally:
        now.restore()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])


def _reshard(model: nn.Module) -> None:
    """A forward pass without a backward leaves whole parameters behind, and gradients belong to the shards."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _uncompiled(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """A compiled block is one operation, and has no lines."""
    if all(module._compiled_call_impl is None for module in model.modules()):
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
