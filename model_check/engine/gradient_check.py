"""One rank's wrong gradients: every N steps all replicas compute those of one and the same micro-batch.

A device that computes wrongly, without an error and without a NaN, spoils every average it takes part in. Replicas with
the same weights, the same micro-batch and the same random numbers must come to the same gradients, but for the order of
their sums; the rank that does not is named. It is off by default: a check costs one micro-batch's forward and backward.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model_check.blackbox.box import BOX
from model_check.blackbox.spans import span
from model_check.engine.batches import mapped
from model_check.engine.feed import to_device
from model_check.engine.inputs import RandomState
from model_check.engine.passes import WholeModel
from model_check.engine.replaying import as_it_was
from model_check.engine.step import TrainStep
from model_check.errors import UsageError
from model_check.record.events.numerics import GradientsDiffer

# Of a gradient's norm. Sums in another order stay far below it; what stays below it does no harm to an average.
_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}
_NOTHING = 1e-3
_COARSEST = max(_TOLERANCE.values())
_FIRST = 0


@dataclass(frozen=True)
class Deviation:
    """Which ranks differ, in which parameter, and by how much of its gradient's norm.

    A wrong gradient travels back through all layers before the one where it arose: the parameter is the last.
    """

    ranks: tuple[int, ...]
    parameter: str
    by: float
    alone: bool  # the others agree: it is these ranks, and not those


class GradientCheck:
    """Compares the gradients of replicas. Training is not changed: random numbers, buffers and weights are restored."""

    def __init__(
        self, every: int, train_step: TrainStep, bare_model: nn.Module, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._every = every
        self._train_step = train_step
        self._model = bare_model
        self._say = say
        self._limit = _TOLERANCE.get(train_step.precision.name, _COARSEST)
        self._passes = WholeModel(bare_model, train_step.precision, train_step.place.device)
        if every and not isinstance(train_step.model, DistributedDataParallel):
            held = "one rank has no peer" if train_step.place.world_size == 1 else "the model is not whole on each rank"
            raise UsageError(
                f"debug.verify_gradients={every} compares replicas, and {held}",
                remedy="set parallel.strategy=ddp with two ranks or more, or debug.verify_gradients=0",
            )

    def is_due(self, step: int) -> bool:
        """After every N-th step."""
        return self._every > 0 and (step + 1) % self._every == 0

    def after_step(self, step: int, micro_batch: Any) -> Deviation | None:
        """Collective. Leaves no gradients behind: those of the step have been used."""
        with span("eval", "gradients compared between ranks"):
            batch = self._same_for_all(micro_batch)
            first = self._fingerprints(step, batch)
            found = self._deviation(first)
            if found is not None and not found.alone:
                # Nobody is in the majority. A rank that does not come to its own result again is the one.
                found = self._inconsistent(first, self._fingerprints(step, batch)) or found
            self._train_step.optimizer.zero_grad(set_to_none=True)
        if found is not None:
            self._report(step, found)
        return found

    def _same_for_all(self, micro_batch: Any) -> Any:
        sent = [mapped(micro_batch, lambda tensor: tensor.cpu())]
        dist.broadcast_object_list(sent, src=_FIRST)
        return to_device(sent[0], self._train_step.place.device)

    def _fingerprints(self, step: int, batch: Any) -> torch.Tensor:
        """Two numbers of each parameter's gradient, of every rank: its norm, and the mean taken to the same measure."""
        self._train_step.optimizer.zero_grad(set_to_none=True)
        with as_it_was(self._model, RandomState.capture(self._train_step.place.device)):
            self._make_alike(step)
            self._passes.accumulate([batch], lambda loss: loss)
        own = torch.stack([_norm_and_sum(p.grad if p.grad is not None else p.new_zeros(1)) for p in self._parameters()])
        everybody = [torch.empty_like(own) for _ in range(self._train_step.place.world_size)]
        dist.all_gather(everybody, own)
        return torch.stack(everybody).cpu().nan_to_num(nan=math.inf)

    @torch.no_grad()
    def _make_alike(self, step: int) -> None:
        """What replicas may rightly differ in: their random numbers, and buffers that follow each one's own data."""
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)
        for buffer in self._model.buffers():
            dist.broadcast(buffer, src=_FIRST)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    def _deviation(self, ranks: torch.Tensor) -> Deviation | None:
        usual = ranks.median(dim=0).values
        away = _distance(ranks, usual)
        odd = self._odd(away)
        if not odd:
            return None
        alone = 2 * len(odd) < len(ranks)
        return self._described(odd if alone else tuple(range(len(ranks))), away, alone=alone)

    def _inconsistent(self, first: torch.Tensor, second: torch.Tensor) -> Deviation | None:
        away = _distance(second, first)
        odd = self._odd(away)
        return self._described(odd, away, alone=True) if 0 < len(odd) < len(first) else None

    def _described(self, odd: tuple[int, ...], away: torch.Tensor, *, alone: bool) -> Deviation:
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        worst = away.max(dim=0).values
        last = int((worst > self._limit).nonzero().max())
        return Deviation(odd, names[last], float(worst[last]), alone)

    def _odd(self, away: torch.Tensor) -> tuple[int, ...]:
        return tuple((away > self._limit).any(dim=1).nonzero().flatten().tolist())

    def _report(self, step: int, found: Deviation) -> None:
        place = self._train_step.place
        BOX.event(
            GradientsDiffer(
                step=step,
                ranks=found.ranks,
                parameter=found.parameter,
                by=found.by if math.isfinite(found.by) else None,
                alone=found.alone,
                device=place.label,
            )
        )
        if place.is_first:
            whose = ", ".join(str(rank) for rank in found.ranks)
            self._say(
                f"[MC411] step {step}: the gradients of rank {whose} differ by {found.by:.2g} in {found.parameter}"
            )


def _norm_and_sum(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    values = (torch.view_as_real(values) if values.is_complex() else values).float()
    return torch.stack([torch.linalg.vector_norm(values), values.sum() / math.sqrt(max(1, gradient.numel()))])


def _distance(ranks: torch.Tensor, usual: torch.Tensor) -> torch.Tensor:
    """How far each rank's numbers are from the usual ones, for each parameter, as a share of the gradient's norm.

    A gradient that is nothing but rounding (a bias that cancels out) is measured by the whole model's.
    """
    norms = usual[..., 0]
    least = _NOTHING * torch.linalg.vector_norm(norms, dim=-1, keepdim=True)
    away = (ranks - usual).abs().amax(dim=-1) / torch.maximum(norms, least)
    both_bad = torch.isinf(ranks).any(dim=-1) & torch.isinf(usual).any(dim=-1)
    return torch.where(both_bad | (ranks == usual).all(dim=-1), 0.0, away.nan_to_num(nan=math.inf))
