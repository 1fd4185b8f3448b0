"""Replaying one forward pass: what may be run once more by this rank alone."""

from __future__ import annotations

import math

import torch
from torch import nn

from model_check.numerics.replaying import Inputs, samples_alone


class Sharded(nn.Linear):
    """Parameters as FSDP2 leaves them after a backward, in a module that notices when it is run."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.runs = 0

    def shard(self) -> None:
        for parameter in self.parameters():
            parameter._local_tensor = parameter.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return super().forward(x)


def test_samples_are_not_tried_one_by_one_once_the_parameters_are_in_shards() -> None:
    """Each try would gather the parameters: the other ranks know nothing of it, or are gone."""
    model, batch = Sharded(), torch.randn(3, 4)
    batch[1] = math.nan
    inputs = Inputs()
    call = inputs.begins(model, (batch,), {})
    assert call is not None
    inputs.keep(call)
    assert (samples_alone(call), model.runs) == ([1], 3)
    model.shard()
    assert (samples_alone(call), model.runs) == ([], 3)
