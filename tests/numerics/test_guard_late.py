"""A bad gradient that a GPU tells of when its step has been applied: what can still be said of it.

The answers are those of the functions that judge it; that a GPU is late is tested on one (tests/gpu, tests/faults).
"""

from __future__ import annotations

import math

import torch

from model_check.numerics.causes import History
from model_check.numerics.hits import Hit
from model_check.numerics.loss_code import LossCode, Place
from model_check.numerics.reports import report_of
from tests.marked_lines import line_of

HALT = "run again with --guard halt: the step is then replayed before it is applied"


def history_of(*norms: float) -> History:
    """As a GPU has it: each norm is known one step later, that of the bad step never."""
    history = History()
    for norm in norms:
        number = history.step(1.0, math.nan, 0.1)
        history.learn(number, norm)
    history.step(1.0, math.nan, 0.1)
    return history


def test_a_norm_is_learnt_for_its_own_step_while_that_is_remembered() -> None:
    history = History()
    numbers = [history.step(float(n), math.nan, 0.1) for n in range(70)]
    history.learn(numbers[-3], 5.0)
    history.learn(numbers[0], 7.0)  # long forgotten
    assert [(step.loss, step.grad_norm) for step in history.before if math.isfinite(step.grad_norm)] == [(67.0, 5.0)]


def test_gradients_that_grew_are_the_cause_of_all_ranks() -> None:
    report = report_of(Hit.too_late(1.0, (), None), history_of(1.0, 50.0, 4e3, 6e6, 8e9), rate=0.1)
    assert report is not None and report.cause == "MC406" and report.local
    assert report.facts == {"grad_norms": [1.0, 50.0, 4e3, 6e6, 8e9]}


def test_a_root_at_zero_in_the_loss_code_is_named_with_its_line() -> None:
    out = torch.ones(3, requires_grad=True)
    loss = (out - 1).square().sum().sqrt()  # ROOT
    file, line = line_of(__file__, "ROOT").rsplit(":", 1)
    place = Place(file, int(line) + 1, "test_a_root_at_zero_in_the_loss_code_is_named_with_its_line", __file__)
    code = LossCode.held(loss.grad_fn, (), place)
    loss.backward()
    report = report_of(Hit.too_late(0.0, [code], place), history_of(1.0, 1.0, 1.0), rate=0.1)
    assert report is not None
    assert (report.cause, report.op, report.location) == ("MC402", "sqrt", line_of(__file__, "ROOT"))


def test_what_nobody_saw_is_said_to_be_unknown() -> None:
    report = report_of(Hit.too_late(1.0, (), None), history_of(1.0, 1.0, 1.0), rate=0.1)
    assert report is not None and (report.cause, report.fix) == ("MC402", (HALT,))
