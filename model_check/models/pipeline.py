"""A pipeline stage: the Llama with the layers of one stage, applied from outside to a model on the meta device.

What another stage holds becomes `Elsewhere`, which has no parameters: names in the state dict stay those of the whole
model, so every stage reads and writes the same checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from model_check.errors import ModelError
from model_check.models.llama import Llama


class Elsewhere(nn.Module):
    """A part of the model that another stage holds: passes on what it is given."""

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x


class LlamaStage(Llama):
    """Tokens (first stage) or the residual stream to the residual stream, or to the loss (last stage)."""

    is_first: bool
    is_last: bool

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        hidden = self.embed(x) if self.is_first else x
        hidden = self.through_layers(hidden, positions=positions, document_ids=document_ids)
        if not self.is_last:
            return hidden
        assert targets is not None, "the last stage computes the loss and needs targets"
        loss = self.linear_cross_entropy(self.norm(hidden), self.output_weight, targets)
        return torch.stack([loss])  # stages pass on tensors with a batch dimension


def layers_of_stage(num_layers: int, stage: int, stages: int) -> range:
    """Consecutive layers; where they do not divide, the first stages take one more, for the last has the output."""
    size, extra = divmod(num_layers, stages)
    first = stage * size + min(stage, extra)
    return range(first, first + size + (stage < extra))


def keep_stage(model: Llama, stage: int, stages: int) -> LlamaStage:
    """Turn a whole model on the meta device into one of its stages, in place."""
    if stages > model.shape.num_layers:
        raise ModelError(
            f"{model.shape.num_layers} layers cannot be cut into parallel.pipeline={stages} stages",
            remedy=f"set parallel.pipeline to {model.shape.num_layers} or less",
        )
    if model.shape.tie_embeddings:
        raise ModelError(
            "tied embeddings belong to the first and to the last stage, and a weight lives on one",
            remedy="set model.tie_embeddings=false or parallel.pipeline=1",
        )
    kept = layers_of_stage(model.shape.num_layers, stage, stages)
    for number in range(model.shape.num_layers):
        if number not in kept:
            model.layers[number] = Elsewhere()
    if stage > 0:
        model.tok_embed = Elsewhere()  # type: ignore[assignment]
    if stage < stages - 1:
        model.norm, model.output = Elsewhere(), Elsewhere()  # type: ignore[assignment]
    model.__class__ = LlamaStage
    assert isinstance(model, LlamaStage)
    model.is_first, model.is_last = stage == 0, stage == stages - 1
    return model
