"""The train step against textbook code: clipping, loss scaling, and the step that must not happen."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from model_check.engine.optimizer import decay_groups
from model_check.engine.place import Place
from model_check.engine.precision import INITIAL_SCALE, Precision
from model_check.engine.step import TrainStep

CPU = torch.device("cpu")


class Square(nn.Module):
    """Loss = mean((w x)^2): its gradient is known by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[3.0, 4.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.weight * x) ** 2).sum()


def make(precision: str = "fp32", max_grad_norm: float = 0.0, lr: float = 0.1) -> TrainStep:
    model = Square()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, weight_decay=0.0)
    return TrainStep(model, optimizer, Precision.choose(precision, CPU), Place(), max_grad_norm=max_grad_norm)


def test_loss_and_gradient_norm_are_those_of_the_whole_batch() -> None:
    step = make()
    one, two = torch.ones(1, 2), torch.full((1, 2), 2.0)
    loss, norm, skipped, stop, *_ = step([one, two], 0.0).tolist()
    # gradients 2 w x^2: (6, 8) and (24, 32); their mean (15, 20) has norm 25.
    assert loss == pytest.approx((25 + 100) / 2)
    assert norm == pytest.approx(25.0)
    assert (skipped, stop) == (0.0, 0.0)


@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_clipping_equals_torchs(max_norm: float) -> None:
    ours = make(max_grad_norm=max_norm)
    reference = copy.deepcopy(ours.model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    sgd = torch.optim.SGD(ours.model.parameters(), lr=0.1, fused=True)
    ours.optimizer = sgd
    x = torch.ones(1, 2)
    ours([x], 0.1)
    reference(x).backward()
    nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    optimizer.step()
    assert torch.allclose(ours.model.weight, reference.weight, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_changes_nothing_and_is_reported(bad: float) -> None:
    step = make(max_grad_norm=1.0)
    step([torch.ones(1, 2)], 0.1)
    before = copy.deepcopy(step.model.state_dict()), copy.deepcopy(step.optimizer.state_dict()["state"])
    skipped = step([torch.full((1, 2), bad)], 0.1)[2].item()
    assert skipped == 1.0
    assert torch.equal(step.model.state_dict()["weight"], before[0]["weight"])
    state = step.optimizer.state_dict()["state"][0]
    assert all(torch.equal(state[k], before[1][0][k]) for k in ("step", "exp_avg", "exp_avg_sq"))
    assert step([torch.ones(1, 2)], 0.1)[2].item() == 0.0


def test_fp16_scales_the_loss_and_recovers_from_an_overflow() -> None:
    step = make("fp16")
    assert step.loss_scale.scale.item() == INITIAL_SCALE
    _, norm, skipped, *_ = step([torch.ones(1, 2)], 0.0).tolist()
    assert skipped == 0.0
    assert norm == pytest.approx(10.0, rel=1e-3), "the norm is that of the unscaled gradient"
    step([torch.full((1, 2), math.inf)], 0.0)
    assert step.loss_scale.scale.item() == INITIAL_SCALE / 2


def test_a_request_to_stop_travels_with_the_loss() -> None:
    assert make()([torch.ones(1, 2)], 0.1, stop_requested=True)[3].item() == 1.0


def test_norms_and_biases_do_not_decay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(3, 4))
    decayed, kept = decay_groups(model, 0.1)
    assert [tuple(p.shape) for p in decayed["params"]] == [(4, 4), (3, 4)]  # type: ignore[attr-defined]
    assert decayed["weight_decay"] == 0.1 and kept["weight_decay"] == 0.0
    assert all(p.ndim == 1 for p in kept["params"])  # type: ignore[attr-defined]
