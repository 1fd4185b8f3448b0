"""Optimizers that call others in their own step: one call of the script is one step, looked at once."""

from __future__ import annotations

import pytest

from tests.blackbox.observed_runs import Outcome, Runner

HEAD = """\
import torch

class Careful(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            if group.get("fail"):
                raise ValueError("before")
        loss = super().step(closure)
        if self.param_groups[0].get("fail_after"):
            raise ValueError("after")
        return loss

class Stubborn(torch.optim.SGD):
    def step(self, closure=None):
        try:
            Careful.step(self)
        except ValueError:
            pass

class Twice(Careful):
    def step(self, closure=None):
        super().step(closure)
        super().step(closure)

class Around(torch.optim.Optimizer):
    '''The same parameters as the one that does the work.'''
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner
    def step(self, closure=None):
        self.inner.step()

class Several(torch.optim.Optimizer):
    '''Has no parameters of its own worth speaking of.'''
    def __init__(self, *inner):
        super().__init__([torch.nn.Parameter(torch.zeros(1))], {})
        self.inner = inner
    def step(self, closure=None):
        for optimizer in self.inner:
            optimizer.step()

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
torch.optim.SGD(model.parameters(), lr=0.01)  # from here on torch wraps the step of SGD too
Careful(model.parameters(), lr=0.01)

def backward():
    model.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return loss
"""

KINDS = """
weight, bias = [[p] for p in model.parameters()]
for optimizer in (
    Careful(model.parameters(), lr=0.01),
    Twice(model.parameters(), lr=0.01),
    Around(Careful(model.parameters(), lr=0.01)),
    Several(Careful(weight, lr=0.01), torch.optim.AdamW(bias)),
):
    for _ in range(2):
        backward()
        optimizer.step()
Careful(model.parameters(), lr=0.01).step(backward)
"""

RAISING = """
def step(optimizer):
    backward()
    try:
        optimizer.step()
    except ValueError as error:
        print(error)

step(Careful(model.parameters(), lr=0.01))
before, after = Careful(model.parameters(), lr=0.01), Careful(model.parameters(), lr=0.01)
before.param_groups[0]["fail"] = after.param_groups[0]["fail_after"] = True
step(before)
step(after)
step(Careful(model.parameters(), lr=0.01))
stubborn = Stubborn(model.parameters(), lr=0.01)
stubborn.param_groups[0]["fail"] = True
step(stubborn)
step(torch.optim.SGD(model.parameters(), lr=0.01))
"""

DIVERGING = """
optimizer = Around(Careful(model.parameters(), lr=1e9))
for _ in range(3):
    backward()
    optimizer.step()
"""

DIVERGING_IN_A_CLOSURE = """
optimizer = Careful(model.parameters(), lr=1e9)
for _ in range(3):
    optimizer.step(backward)
"""


def optimizer_spans(outcome: Outcome) -> list[tuple[str, str]]:
    """(class of the optimizer, how its step ended) of each span, in their order, none inside another."""
    crumbs = outcome.crumbs(phase="optimizer")
    begins, ends = crumbs[::2], crumbs[1::2]
    assert [c.event for c in begins] == ["begin"] * len(begins) and [c.event for c in ends] == ["end"] * len(begins)
    return [(begin.detail, end.detail) for begin, end in zip(begins, ends, strict=True)]


@pytest.mark.slow
def test_a_step_that_calls_another_is_one_step(run: Runner) -> None:
    outcome = run(HEAD + KINDS, env={"MODEL_CHECK_GUARD": "observe"})
    assert outcome.codes == [0], outcome.errors
    names = [name for name in ("Careful", "Twice", "Around", "Several") for _ in range(2)]
    assert optimizer_spans(outcome) == [(name, "") for name in [*names, "Careful"]]
    assert [c.step for c in outcome.crumbs(event="point", phase="step")] == list(range(9))
    # The span is that of the script's own line, not of the lines of its classes.
    (plain,) = [n for n, text in enumerate((HEAD + KINDS).splitlines(), 1) if text == "        optimizer.step()"]
    sites = {c.site for c in outcome.crumbs(event="begin", phase="optimizer")[:-1]}
    assert sites == {f"train.py:{plain}"}
    assert outcome.events("guard_failed") == outcome.events("recording_failed") == []


@pytest.mark.slow
def test_a_step_that_raised_is_no_step_and_not_the_one_around_the_next(run: Runner) -> None:
    outcome = run(HEAD + RAISING)
    assert (outcome.codes, outcome.outputs) == ([0], ["before\nafter\n"]), outcome.errors
    assert optimizer_spans(outcome) == [
        ("Careful", ""),
        ("Careful", "raised"),
        ("Careful", "raised"),
        ("Careful", ""),
        ("Stubborn", ""),  # what it called raised; it did not
        ("SGD", ""),
    ]
    assert [c.step for c in outcome.crumbs(event="point", phase="step")] == list(range(4))


@pytest.mark.slow
@pytest.mark.parametrize("body", [DIVERGING, DIVERGING_IN_A_CLOSURE], ids=["super", "closure"])
def test_the_guard_is_asked_once_a_step(run: Runner, body: str) -> None:
    outcome = run(HEAD + body, env={"MODEL_CHECK_GUARD": "observe"})
    (event,) = outcome.events("nonfinite")
    assert (event["cause"], event["step"]) == ("MC405", 2)
    # Asked twice, it would know each loss twice, and that it grew with every update would not be seen.
    assert event["evidence"][0] == "observed: the loss grew with every update since the first: 0.5007, 5.007e+19"
