"""What is held on to of the loss code tells, after the backward has let the graph go, what went wrong in it.

That is how a loss of a GPU is judged, which is known only then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from model_check.numerics.loss_code import LossCode, Place, Problem
from tests.marked_lines import line_of

Backward = Callable[[torch.Tensor], None]
LossFunction = Callable[[torch.Tensor, Backward], None]


def divided(out: torch.Tensor, backward: Backward) -> None:
    mask = torch.zeros(len(out))
    loss = (out.sum(1) * mask).sum() / mask.sum()  # DIVIDED
    backward(loss)


def logarithm(out: torch.Tensor, backward: Backward) -> None:
    loss = -(out * 0).log().mean()  # LOGARITHM
    backward(loss)


def ignored(out: torch.Tensor, backward: Backward) -> None:
    loss = F.cross_entropy(out, torch.full((len(out),), -100))  # IGNORED
    backward(loss)


def target(out: torch.Tensor, backward: Backward) -> None:
    wanted = torch.zeros_like(out).index_fill(0, torch.tensor([2]), torch.inf)
    loss = F.mse_loss(out, wanted)  # TARGET
    backward(loss)


def root(out: torch.Tensor, backward: Backward) -> None:
    loss = (out - out.detach()).square().sum(1).sqrt().mean()  # ROOT
    backward(loss)


def power(out: torch.Tensor, backward: Backward) -> None:
    loss = (out * 0).pow(0.5).mean()  # POWER
    backward(loss)


def held_of(compute: LossFunction) -> LossCode:
    """What is held on to when the function calls `backward`, and that has run."""
    held: list[LossCode] = []

    def backward(loss: torch.Tensor) -> None:
        place = Place(__file__, sys._getframe(1).f_lineno, compute.__name__, __file__)
        held.append(LossCode.held(loss.grad_fn, (), place))
        loss.backward()

    compute(torch.randn(4, 3, requires_grad=True), backward)
    (code,) = held
    return code


@pytest.mark.parametrize(
    ("compute", "op", "problem"),
    [
        (divided, "Div", "empty_sum"),
        (logarithm, "Log", "logarithm"),
        (ignored, "NllLoss", "labels_ignored"),
        (target, "MseLoss", "bad_target"),
    ],
)
def test_what_made_the_loss_bad(compute: LossFunction, op: str, problem: str) -> None:
    found = held_of(compute).first_bad()
    assert found is not None and found.problem is not None
    assert (found.op, found.problem.kind, found.made_it) == (op, problem, True)
    if op in ("Div", "Log", "NllLoss"):
        assert f"{found.file}:{found.line}" == line_of(__file__, compute.__name__.upper())
    assert found.samples == ((2,) if compute is target else ())


@pytest.mark.parametrize(("compute", "op"), [(root, "Sqrt"), (power, "Pow")])
def test_what_made_the_gradients_bad(compute: LossFunction, op: str) -> None:
    found = held_of(compute).at_a_pole()
    assert found is not None
    assert (found.op, found.problem) == (op, Problem("infinite_slope"))
    assert f"{found.file}:{found.line}" == line_of(__file__, compute.__name__.upper())


def held_and_run(loss: torch.Tensor) -> LossCode:
    code = LossCode.held(loss.grad_fn, (), None)
    loss.backward()
    return code


def test_of_a_healthy_loss_nothing_is_said() -> None:
    out = torch.rand(4, 3, requires_grad=True) + 0.1
    code = held_and_run((out.log().sum() / torch.ones(4).sum()).square().sqrt())
    assert code.at_a_pole() is None
    assert [operation.problem() for operation in code.operations] == [None] * len(code.operations)


def test_what_the_script_overwrites_is_not_judged() -> None:
    count = torch.ones(())
    out = torch.randn(4, requires_grad=True)
    code = held_and_run(out.sum() / count)
    count.zero_()  # for the next step
    assert code.first_bad() is None


def test_large_numbers_are_not_kept_alive_and_nobody_is_blamed_for_them() -> None:
    out = torch.zeros(1 << 18, requires_grad=True)
    for part in (out * 1, (out * 1)[:4]):  # itself, and a small part of it
        code = held_and_run(part.log().sum())
        assert [dict(operation.tensors) for operation in code.operations] == [{}] * len(code.operations)
        assert code.first_bad() is None


def test_numbers_that_came_in_bad_are_not_the_loss_codes_doing() -> None:
    out = torch.tensor([1.0, torch.nan], requires_grad=True)
    assert held_and_run(out.log().mean()).first_bad() is None


def added_up(terms: int) -> torch.Tensor:
    """A loss of many terms, of which the first divides by nothing."""
    out = torch.randn(4, 3, requires_grad=True)
    mask = torch.zeros(4)
    loss = (out.sum(1) * mask).sum() / mask.sum()
    for _ in range(terms - 1):
        loss = loss + F.cross_entropy(out, torch.tensor([0, 1, 2, 0]))  # three operations
    return loss


@pytest.mark.parametrize("terms", [1, 2, 5])
def test_of_several_terms_the_first_is_held_on_to_as_well(terms: int) -> None:
    found = held_and_run(added_up(terms)).first_bad()
    assert found is not None and (found.op, found.empty) == ("Div", True)


def test_where_the_beginning_was_not_held_on_to_no_other_term_is_blamed() -> None:
    code = held_and_run(added_up(8))
    assert code.cut_off and code.first_bad() is None


def test_all_of_a_long_loss_code_is_looked_at_while_its_graph_is_there() -> None:
    found = LossCode.whole(added_up(60).grad_fn, (), None).first_bad()
    assert found is not None and (found.op, found.empty) == ("Div", True)
    beyond = LossCode.whole(added_up(90).grad_fn, (), None)
    assert beyond.cut_off and beyond.first_bad() is None
