"""A rank's own gradients are looked at before they are exchanged, and only then."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model_check.numerics.finite import LocalCheck, watch_replica


@pytest.fixture
def lone_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_bad_number_stays_in_the_sum_until_the_pass_that_exchanges(lone_rank: None) -> None:
    model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    check = watch_replica(torch.device("cpu"))
    check.begin()
    with model.no_sync():
        model(torch.full((1, 4), math.inf)).sum().backward()
    assert check.looked_at == 0 and check.bad().item() == 0.0
    model(torch.ones(1, 4)).sum().backward()
    assert check.looked_at == 1 and check.bad().item() == 1.0
    check.begin()
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    assert check.looked_at == 1 and check.bad().item() == 0.0


def test_what_is_reduced_after_the_gradients_is_none_of_them(lone_rank: None) -> None:
    check = watch_replica(torch.device("cpu"))
    check.begin()
    check.close()
    dist.all_reduce(torch.tensor([math.nan]))
    assert check.looked_at == 0 and check.bad().item() == 0.0


def test_a_check_that_is_gone_is_told_no_more(lone_rank: None) -> None:
    from model_check.blackbox import native_collectives

    dist.all_reduce(torch.ones(1))  # those of other tests are gone by now
    before = native_collectives._Registered.told
    check = watch_replica(torch.device("cpu"))
    assert len(native_collectives._Registered.told) == len(before) + 1
    del check
    dist.all_reduce(torch.ones(1))
    assert native_collectives._Registered.told == before


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.lists(st.sampled_from([1.0, math.nan, math.inf, -math.inf]), min_size=1, max_size=30))
def test_one_bad_piece_of_any_number_is_seen(room: int, values: list[float]) -> None:
    check = LocalCheck(torch.device("cpu"), pieces=room)
    for _ in range(2):  # in the second step there is room for all of them
        check.begin()
        for value in values:
            check.look(torch.tensor([[0.5, value]], dtype=torch.bfloat16))
        assert check.looked_at == len(values)
        assert check.bad().item() == float(not all(map(math.isfinite, values)))
    assert torch.isfinite(check.sums()).tolist() == [math.isfinite(value) for value in values]
