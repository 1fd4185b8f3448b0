"""A rank's own gradients are looked at before they are exchanged, and only then."""

from __future__ import annotations

import math

import torch
from torch import nn

from model_check.observe.numerics.finite import watch_replica


def test_a_bad_number_stays_in_the_sum_until_the_pass_that_exchanges() -> None:
    model = nn.Linear(4, 1, bias=False)
    exchanging = False
    check = watch_replica(model, torch.device("cpu"), lambda: exchanging)
    looked: list[int] = []
    look = check.look
    check.look = lambda piece, gradient: (looked.append(piece), look(piece, gradient))[1]  # type: ignore[func-returns-value, method-assign]
    check.begin()
    model(torch.full((1, 4), math.inf)).sum().backward()
    assert looked == [] and check.bad().item() == 0.0
    exchanging = True
    model(torch.ones(1, 4)).sum().backward()
    assert looked == [0] and check.bad().item() == 1.0
    check.begin()
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    assert check.bad().item() == 0.0
