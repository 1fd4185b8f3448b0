"""How much of a step's gradients is looked at: never more than its share of the time, and nothing left out for good."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

from model_check.blackbox import native_collectives
from model_check.numerics.budget import (
    ADVANCE_S,
    EVERYTHING,
    NOTHING,
    PARTS,
    SHARE,
    Account,
    Amount,
    Budget,
    Choice,
    Part,
    Prices,
)
from model_check.numerics.exchanges import OwnGradients
from model_check.numerics.script_guard import _own_share


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-3, 2.0), st.floats(1e-6, 0.5))
def test_looking_never_takes_more_than_its_share_of_a_long_run(step_s: float, look_s: float) -> None:
    """The dearest price there is: a part of the gradients that takes half of what all of them take."""
    now, steps, spent, read = 0.0, 2000, 0.0, []

    def price(choice: Choice) -> float:
        return look_s if choice == EVERYTHING else look_s / 2

    budget = Budget(lambda: now)
    for _ in range(steps):
        choice = budget.part_of_a_step(price)
        if choice != NOTHING:
            budget.spend(price(choice))
            spent += price(choice)
        read.append(choice)
        now += step_s
    assert spent <= ADVANCE_S + SHARE * steps * step_s + look_s  # the last one may overdraw
    assert set(read) <= {NOTHING, EVERYTHING, *PARTS} and read[0] in (EVERYTHING, PARTS[-1])
    if look_s <= SHARE * step_s:
        assert set(read) == {EVERYTHING}
    elif look_s / 2 <= SHARE * step_s:
        assert NOTHING not in read and EVERYTHING in read


def test_what_is_saved_by_parts_adds_up_to_a_look_at_everything() -> None:
    now, read = 0.0, []
    budget = Budget(lambda: now)
    for _ in range(3000):
        choice = budget.part_of_a_step(lambda choice: 2 * SHARE / choice.of)  # all of them cost two steps' worth
        budget.spend(2 * SHARE / choice.of)
        read.append(choice)
        now += 1.0
    later = read[1000:]  # the advance is spent
    assert set(later) == {EVERYTHING, Choice(8)}
    assert later.count(EVERYTHING) / len(later) == pytest.approx(3 / 7, abs=0.01)  # 2x + (1 - x)/4 = 1


@pytest.mark.parametrize(
    ("launches", "chosen"),
    [
        (0.3, Choice(8)),
        (0.75, Choice(16)),
        (0.84, Choice(32)),
        (1.5, Choice(16, in_turns=True)),
        (3.54, Choice(32, in_turns=True)),
        (9.0, Choice(32, in_turns=True)),
    ],
)
def test_buckets_take_turns_only_where_a_kernel_for_each_is_too_dear(launches: float, chosen: Choice) -> None:
    """In steps' worths: all numbers cost one and a half; of the buckets a quarter takes its turn."""
    now = 0.0
    budget = Budget(lambda: now)
    budget.spend(ADVANCE_S - SHARE / 100)  # nothing is left to read them all
    now = 1.0
    share = {False: 1.0, True: 0.25}
    assert budget.part_of_a_step(lambda of: SHARE * share[of.in_turns] * (1.5 / of.of + launches)) == chosen


def test_the_price_of_a_part_is_that_of_the_nearest_one_which_was_read() -> None:
    prices = Prices()
    assert prices.seconds("cpu", 1000, 8) < prices.seconds("cpu", 1000, 1)
    prices.learn("cpu", 1000, 1, 64.0)
    assert [prices.seconds("cpu", 1000, of) for of in (1, 8, 32)] == [64.0, 8.0, 2.0]
    prices.learn("cpu", 1000, 16, 10.0)
    assert [prices.seconds("cpu", 1000, of) for of in (1, 8, 16, 32)] == [64.0, 20.0, 10.0, 5.0]
    assert prices.seconds("cuda", 1000, 1) < 1e-6  # of another device nothing is known


def test_small_buckets_do_not_make_large_ones_dear() -> None:
    """One of 16 MB takes a millisecond, six of 256 bytes ten microseconds each: together little more than the one."""
    account, buckets = Account(), [torch.zeros(1 << 22), *[torch.zeros(64)] * 6]
    for _ in range(3):
        part, amount = account.part_of_a_step(), Amount()
        for bucket in buckets:
            amount.add(bucket)
            seconds = 1e-3 if bucket.numel() > 64 else 1e-5
            account.looked_here(bucket.nbytes, part, time.perf_counter() - seconds)
        account.step_ended(amount)
        assert part.choice == EVERYTHING
    assert 1e-3 < account._price(EVERYTHING) < 0.05


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300_000), st.sampled_from([EVERYTHING, *PARTS]), st.sampled_from([Part.groups, Part.slice]))
def test_nothing_is_left_out_for_good(
    numbers: int, choice: Choice, taken: Callable[[Part, torch.Tensor], torch.Tensor]
) -> None:
    tensor = torch.zeros(numbers)
    for turn in range(8 * choice.of):
        read = taken(Part(choice, turn), tensor)
        assert taken is Part.slice or read.numel() <= Part(choice, turn).numbers(tensor)
        assert read.numel() <= tensor.numel() // choice.of + 32 or read.numel() == tensor.numel() < 1 << 16
        read += 1
    assert tensor.min() >= 1


@given(st.integers(0, 60), st.sampled_from([EVERYTHING, *PARTS]))
def test_every_bucket_has_its_turn_and_the_last_ones_always(buckets: int, choice: Choice) -> None:
    """With another group of its numbers each time."""
    of = choice.of
    seen = torch.zeros(buckets, of)
    for turn in range(4 * of if choice.in_turns else of):
        part = Part(choice, turn, buckets)
        looked_at = [bucket for bucket in range(1, buckets + 1) if part.includes(bucket)]
        assert set(range(max(1, buckets - 1), buckets + 1)) <= set(looked_at)
        assert len(looked_at) <= max(8, buckets / 4 + 3) if choice.in_turns else len(looked_at) == buckets
        numbers = torch.zeros(1 << 16)
        part.groups(numbers).fill_(1.0)
        groups = numbers.view(-1, of, 32).amax(dim=(0, 2))
        for bucket in looked_at:
            seen[bucket - 1] += groups
    assert (seen > 0).all()
    assert not Part(NOTHING, 3, buckets).includes(buckets)


@pytest.mark.parametrize("choice", PARTS)
def test_a_bad_row_of_a_weight_is_seen_in_every_turn(choice: Choice) -> None:
    gradient = torch.zeros(64, 1024)
    gradient[17] = math.nan
    assert all(Part(choice, turn).groups(gradient.view(-1)).sum().isnan() for turn in range(4 * choice.of))


def test_what_is_not_in_one_piece_is_read_in_full() -> None:
    turned, part = torch.zeros(512, 256).t(), Part(Choice(8), 3)
    assert part.groups(turned) is turned and part.slice(turned) is turned


def _step(own: OwnGradients, model: Any, spoilt: float) -> None:
    """As the dispatcher and the optimizer tell of it."""
    own.forget()
    model.zero_grad()
    _pass(own, model, spoilt)


def _pass(own: OwnGradients, model: Any, spoilt: float = 1.0) -> None:
    own.backward_begins(model.parameters())
    x = torch.ones(2, 512)
    x[1] *= spoilt
    model(x).sum().backward()
    group: Any = dist.group.WORLD
    buckets = [p.grad.view(-1) for p in reversed(list(model.parameters()))]
    own.exchange_in_backward(native_collectives.Exchange(buckets, group.boxed(), overlaps=True), [model])
    own.backward_ended()


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("exchanged", [True, False])
def test_where_all_would_be_too_dear_a_part_is_looked_at_in_every_step(exchanged: bool) -> None:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 300)))
    own = OwnGradients(every_step=False)
    own._account.budget = Budget(lambda: 0.0)  # a busy machine takes long over a step, and would earn a whole look
    own.learn_names(model)
    numbers = sum(p.numel() for p in model.parameters())
    for step in range(40):
        if step == 1:
            own._account.budget._left_s = 1e-9  # the advance is spent
        if exchanged:
            _step(own, model, math.nan if step == 39 else 1.0)
        else:
            own.forget()
            model.zero_grad()
            model(torch.ones(2, 512) * (math.nan if step == 39 else 1.0)).sum().backward()
        own._account.budget._left_s = max(own._account.budget._left_s, 1e-9)
        looked = own.at_the_optimizer(list(model.parameters()))
        assert looked is not None
        assert looked.numbers == numbers if step == 0 else looked.numbers < numbers
        assert looked.bad().startswith("the gradient") == (step == 39)


@pytest.mark.usefixtures("lone_group")
def test_parts_of_many_passes_are_never_taken_for_a_look_at_everything() -> None:
    """Each pass reads the same groups again: however many numbers that makes, this rank is not known to be clean."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 300))
    parameters = list(model.parameters())
    own = OwnGradients(every_step=False)
    own.learn_names(model)
    _step(own, model, 1.0)
    looked = own.at_the_optimizer(parameters)
    assert looked is not None and _own_share(looked, parameters).clean
    own.forget()
    own._account.budget = Budget(lambda: 0.0)
    own._account.budget._left_s = 1e-9  # the advance is spent
    for _ in range(40):
        _pass(own, model)
    looked = own.at_the_optimizer(parameters)
    assert looked is not None and looked.numbers >= sum(p.numel() for p in parameters)
    assert not looked.bad() and not _own_share(looked, parameters).clean
