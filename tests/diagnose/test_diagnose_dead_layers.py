"""The layer that the gradient does not get past, out of everything that has none: in real models with a dead part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from staging import Stage
from torch import nn

from model_check.diagnose.dead_layers import where_it_stops


class Around(nn.Module):
    """Something that can be dead, and a way around it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def linear(*, bias: bool = True, shift: float = 0.0) -> nn.Linear:
    layer = nn.Linear(8, 8, bias=bias)
    if bias and shift:
        nn.init.constant_(layer.bias, shift)
    return layer


def four(function: nn.Module, shift: float) -> nn.Module:
    """Four layers; the function behind the second is dead or saturated."""
    layers = [linear(), nn.Tanh(), linear(shift=shift), function, linear(), nn.Tanh(), linear()]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[nn.Module, str]] = {
    "relu": (four(nn.ReLU(), -100.0), "2.weight"),
    "sigmoid": (four(nn.Sigmoid(), -200.0), "2.weight"),
    "tanh": (four(nn.Tanh(), 100.0), "2.weight"),
    "times 0": (four(Times(0.0), 0.0), "2.weight"),
    "norm behind it": (
        nn.Sequential(linear(), linear(shift=-100.0), nn.ReLU(), nn.LayerNorm(8), linear(), linear()),
        "1.weight",
    ),
    "norm before it": (
        nn.Sequential(linear(), nn.LayerNorm(8), linear(shift=-100.0), nn.ReLU(), linear()),
        "2.weight",
    ),
    "no bias behind it": (
        nn.Sequential(
            linear(), Around(nn.Sequential(linear(shift=-100.0), nn.ReLU(), linear(bias=False))), nn.Tanh(), linear()
        ),
        "1.body.0.weight",
    ),
    "no bias at all": (
        nn.Sequential(
            linear(bias=False),
            Around(nn.Sequential(linear(bias=False), Times(0.0), linear(bias=False))),
            linear(bias=False),
        ),
        "1.body.0.weight",
    ),
    "a frozen layer in front": (
        nn.Sequential(linear(shift=-100.0).requires_grad_(False), nn.ReLU(), linear(), nn.Tanh(), linear()),
        "2.weight",
    ),
}


def norms(model: nn.Module) -> dict[str, float]:
    torch.manual_seed(0)
    model.zero_grad()
    target = torch.randn(16, 8)
    (model(torch.randn(16, 8)) - target).square().mean().backward()
    return {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_the_dead_layer_is_named_and_not_the_ones_before_it(name: str, stage: Stage) -> None:
    model, guilty = MODELS[name]
    seen = norms(model)
    assert seen[guilty] == 0 and any(seen.values())
    stage.ranks(2)
    for step in (50, 100, 150, 200):
        for actor in stage.actors:
            actor.event("gradients", step=step, norms=seen)
    found = stage.first()
    assert (found.code, found.tensor, found.ranks, found.step) == ("MC415", guilty, [0, 1], 200)
    others = sum(norm == 0 for norm in seen.values()) - 1
    assert found.title == f"{guilty} gets no gradient" + (f", and {others} more like it" if others else "")


def test_the_evidence_tells_what_is_before_it_from_what_is_behind_it(stage: Stage) -> None:
    stage.ranks(1)
    for step in (50, 100, 150, 200):
        stage.actors[0].event("gradients", step=step, norms=norms(MODELS["relu"][0]))
    assert stage.first().evidence == [
        "observed: its gradient is exactly 0 at steps 50, 100, 150, 200 on rank 0",
        "observed: so is that of 0.weight, 0.bias, 2.bias, in this layer or before it",
        "observed: so is that of 4.weight behind it",
        "inferred: the gradient stops between this layer and 4.bias, the next that has one",
    ]


def test_a_weight_whose_bias_learns_is_given_zeros(stage: Stage) -> None:
    stage.ranks(1)
    for step in (50, 100, 150, 200):
        stage.actors[0].event("gradients", step=step, norms=norms(MODELS["a frozen layer in front"][0]))
    assert stage.first().evidence[1:] == [
        "inferred: the layer is given nothing but 0: others of its parameters do get a gradient"
    ]


def test_units_of_fsdp_hold_whole_layers() -> None:
    names = [f"{number}._fsdp_wrapped_module._flat_param" for number in range(4)]
    stop = where_it_stops(names, set(names[:3]))
    assert stop is not None and (stop.name, stop.next_one) == (names[2], names[3])


NAMES = st.lists(
    st.builds("{}.{}".format, st.integers(0, 5), st.sampled_from(["weight", "bias", "scale"])), unique=True, max_size=12
)


@given(NAMES, st.data())
def test_every_parameter_without_a_gradient_is_accounted_for_once(names: list[str], data: Any) -> None:
    names.sort()
    dead = data.draw(st.sets(st.sampled_from(names))) if names else set()
    stop = where_it_stops(names, dead)
    if stop is None:
        assert not dead
        return
    assert sorted([stop.name, *stop.before, *stop.behind]) == sorted(dead)
    assert stop.next_one in names and stop.next_one not in dead if stop.next_one else True
