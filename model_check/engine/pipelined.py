"""Passes of a pipeline stage, on torch's own schedules: 1F1B, or GPipe where there are fewer batches than stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from model_check.engine.passes import ScaleLoss, document_arguments
from model_check.engine.precision import Precision
from model_check.engine.sharded import PIPELINE
from model_check.models.pipeline import LlamaStage


def _unscaled(loss: torch.Tensor) -> torch.Tensor:
    return loss


class PipelinedModel:
    """One stage of a Llama. The micro-batches of a step are those of the schedule; every stage is given all of them,
    and takes from them what it needs: the first the tokens, the last the targets."""

    def __init__(self, model: LlamaStage, mesh: DeviceMesh, precision: Precision, device: torch.device) -> None:
        self.computes_loss = model.is_last
        self._model = model
        self._mesh = mesh
        self._dtype = precision.gather_dtype or precision.parameter_dtype
        self._device = device
        self._schedules: dict[tuple[int, torch.Size], Any] = {}
        self._scale_loss: ScaleLoss = _unscaled

    def accumulate(self, micro_batches: Sequence[Any], scale_loss: ScaleLoss) -> torch.Tensor:
        share = 1.0 / len(micro_batches)
        self._scale_loss = lambda loss: scale_loss(loss * share)
        losses = self._run(micro_batches, "step")
        # The schedule hands back what it ran backward from; the scale is a power of two, so dividing is exact.
        return losses.sum() / scale_loss(torch.ones((), device=self._device))

    @torch.no_grad()
    def loss(self, batch: Any) -> torch.Tensor:
        self._scale_loss = _unscaled
        return self._run([batch], "eval").sum()

    def _run(self, micro_batches: Sequence[Any], verb: str) -> torch.Tensor:
        """The loss of each micro-batch on the last stage; zero on the others."""
        schedule = self._schedule(len(micro_batches), micro_batches[0].tokens.shape)
        tokens = torch.cat([batch.tokens for batch in micro_batches])
        targets = torch.cat([batch.targets for batch in micro_batches])
        documents = [document_arguments(batch) for batch in micro_batches]
        extra = {name: torch.cat([part[name] for part in documents]) for name in documents[0]}
        losses: list[torch.Tensor] = []
        run = getattr(schedule, verb)
        inputs = (tokens,) if self._model.is_first else ()
        if self._model.is_last:
            run(*inputs, target=targets, losses=losses, targets=targets, **extra)
        else:
            run(*inputs, **extra)
        return torch.stack([loss.detach().float() for loss in losses] or [torch.zeros((), device=self._device)])

    def _schedule(self, count: int, shape: torch.Size) -> Any:
        """A schedule is made for one number and one shape of micro-batches: that of training, that of evaluation."""
        key = (count, shape)
        if key not in self._schedules:
            stages = self._mesh[PIPELINE].size()
            kind = Schedule1F1B if count >= stages else ScheduleGPipe
            # The loss comes out of the last stage: its weights are gathered only while the stage runs.
            self._schedules[key] = kind(
                self._stage(shape),
                n_microbatches=count,
                loss_fn=lambda output, target: self._scale_loss(output.reshape(())),
                scale_grads=False,
            )
        return self._schedules[key]

    def _stage(self, shape: torch.Size) -> PipelineStage:
        """The shapes are known, so the stages need not ask each other."""
        model = self._model
        stream = torch.empty(*shape, model.shape.hidden_size, dtype=self._dtype, device="meta", requires_grad=True)
        tokens = torch.empty(*shape, dtype=torch.int64, device="meta")
        loss = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
        return PipelineStage(
            model,
            self._mesh.get_local_rank(PIPELINE),
            self._mesh[PIPELINE].size(),
            self._device,
            input_args=(tokens,) if model.is_first else (stream,),
            output_args=(loss,) if model.is_last else (stream,),
            group=self._mesh.get_group(PIPELINE),
        )
