"""Which gradients are read in a step where reading them all would cost too much, and that none is left out for good."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from model_check.blackbox import native_collectives
from model_check.numerics.exchanges import LAST, TURNS, OwnGradients, Turn
from model_check.numerics.script_guard import _own_share


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300_000), st.integers(1, 40), st.integers(0, 100))
def test_every_number_is_read_within_eight_steps(numbers: int, buckets: int, first: int) -> None:
    gradient, bucket = torch.zeros(numbers), torch.zeros(numbers)
    for step in range(first, first + TURNS):
        turn = Turn(step, buckets)
        turn.of_gradient(gradient).add_(1)
        read = turn.of_bucket(bucket, buckets)
        assert read is not None
        read.add_(1)
    assert gradient.min() >= 1 and bucket.min() >= 1


@given(st.integers(1, 400), st.integers(0, 100))
def test_an_eighth_of_the_buckets_is_read_and_a_part_of_the_last_ones(buckets: int, step: int) -> None:
    """With no more kernels than that, and an eighth of the numbers on average."""
    bucket, turn = torch.zeros(1 << 16), Turn(step, buckets)
    read = [turn.of_bucket(bucket, number) for number in range(1, buckets + 1)]
    assert all(part is not None for part in read[-LAST:])
    assert sum(part is not None for part in read) <= buckets / TURNS + 1 + LAST
    whole = sum(part is bucket for part in read)
    assert abs(whole - buckets / TURNS) < 1
    assert all(part is None or part is bucket or part.numel() == bucket.numel() // TURNS for part in read)
    assert turn.of_gradient(bucket).numel() == bucket.numel() // TURNS


def test_before_the_number_of_buckets_is_known_a_part_of_each_is_read() -> None:
    assert all(Turn().of_bucket(torch.zeros(1 << 16), number) is not None for number in range(1, 100))


@pytest.mark.parametrize("step", range(TURNS))
def test_a_bad_row_of_a_weight_in_the_last_bucket_is_seen_in_every_step(step: int) -> None:
    gradient = torch.zeros(64, 1024)
    gradient[17] = math.nan
    read = Turn(step, 20).of_bucket(gradient.view(-1), 20)
    assert read is not None and read.sum().isnan()


def test_what_is_not_in_one_piece_is_read_in_full() -> None:
    turned, turn = torch.zeros(512, 256).t(), Turn(3, 1)
    assert turn.of_bucket(turned, 1) is turned and turn.of_gradient(turned) is turned


WIDTH = 288  # the weights are read in parts


class Model(torch.nn.Sequential):
    """Its buckets are its parameters, the nearest to the loss first."""

    def __init__(self, layers: int) -> None:
        super().__init__(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def _step(own: OwnGradients, model: Any, *, spoilt: str = "", exchanged: bool = True) -> Any:
    """As the dispatcher and the optimizer tell of it. `spoilt`: of this parameter's gradient the very last number."""
    own.forget()
    model.zero_grad()
    _pass(own, model, spoilt=spoilt, exchanged=exchanged)
    return own.at_the_optimizer(list(model.parameters()))


def _pass(own: OwnGradients, model: Any, *, spoilt: str = "", exchanged: bool = True) -> None:
    own.backward_begins(model.parameters())
    model(torch.ones(2, WIDTH)).sum().backward()
    if spoilt:
        model.get_parameter(spoilt).grad[-1, -1] = math.nan
    group: Any = dist.group.WORLD
    if exchanged:
        buckets = [p.grad.view(-1) for p in reversed(list(model.parameters()))]
        own.exchange_in_backward(native_collectives.Exchange(buckets, group.boxed(), overlaps=True), [model])
    own.backward_ended()


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("weight", ["0.weight", "9.weight", "11.weight"])
def test_one_number_of_any_bucket_has_its_turn_in_eight_steps(weight: str, exchanged: bool) -> None:
    model, own = DistributedDataParallel(Model(12)), OwnGradients(in_turns=("cpu",))
    own.learn_names(model)
    _step(own, model, exchanged=exchanged)
    seen = [_step(own, model, spoilt=f"module.{weight}", exchanged=exchanged).bad() for _ in range(TURNS)]
    assert {name for name in seen if name} == {f"gradient of {weight}"}
    assert own.left_out


@pytest.mark.usefixtures("lone_group")
def test_all_of_them_are_read_in_every_step_where_nothing_takes_turns() -> None:
    model, own = DistributedDataParallel(Model(12)), OwnGradients(in_turns=("cuda",))
    own.learn_names(model)
    for _ in range(10):
        assert _step(own, model, spoilt="module.3.weight").bad() == "gradient of 3.weight"
    assert not own.left_out


@pytest.mark.usefixtures("lone_group")
def test_parts_of_many_passes_are_never_taken_for_a_look_at_everything() -> None:
    """Each pass reads the same parts again: however many numbers that makes, this rank is not known to be clean."""
    model = Model(2)
    parameters = list(model.parameters())
    own = OwnGradients(in_turns=())
    own.learn_names(model)
    assert _own_share(_step(own, model), parameters).clean
    own.forget()
    own.in_turns = ("cpu",)
    for _ in range(40):
        _pass(own, model)
    looked = own.at_the_optimizer(parameters)
    assert looked is not None and looked.numbers >= sum(p.numel() for p in parameters)
    assert not looked.bad() and not _own_share(looked, parameters).clean
