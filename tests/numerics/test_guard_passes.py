"""Several backwards before one step of the optimizer: the finding has line, loss and replay of the one that was bad."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from model_check.diagnose.examine import examine
from model_check.numerics.causes import History
from model_check.numerics.hits import Hit, OwnShare
from model_check.numerics.loss_code import Place
from model_check.numerics.reports import report_of
from tests.blackbox.observed_runs import Outcome, Runner, last_json

HEAD = """
import gc, json, torch
import torch.distributed as dist
from torch import nn
torch.manual_seed(0)
class Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bad):
        ctx.bad = bad
        return x.clone()
    @staticmethod
    def backward(ctx, slope):
        return (slope * float("nan") if ctx.bad else slope), None
def without_row(x, gone):
    return x * (torch.arange(8) != 5)[:, None] if gone else x
"""

LENGTHS = """
class Lengths(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)
    def forward(self, x):
        h = self.inner(x) * x.abs().sum(1, keepdim=True)
        return torch.sqrt(h.square().sum(1))  # MODULE
"""

# In each of them the loss of the bad pass is below 5 and that of the other above.
LOSS_CODE = """
model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    opt.zero_grad()
    a = model(torch.randn(8, 4)) * (0 if step == BAD else 1)
    loss_a = torch.sqrt(a.square().sum())  # HERE
    loss_a.backward()
    loss_b = model(torch.randn(8, 4)).square().mean() + 7
    loss_b.backward()
    opt.step()
"""
IN_MODULE = (
    LENGTHS
    + """
model = Lengths()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    opt.zero_grad()
    loss_a = model(without_row(torch.randn(8, 4), step == BAD)).mean()
    loss_a.backward()
    loss_b = model(torch.randn(8, 4)).mean() + 7
    loss_b.backward()
    opt.step()
"""
)
FORWARDS_FIRST = (
    LENGTHS
    + """
model = Lengths()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    opt.zero_grad()
    loss_a = model(without_row(torch.randn(8, 4), step == BAD)).mean()
    loss_b = model(torch.randn(8, 4)).mean() + 7
    loss_a.backward()
    loss_b.backward()
    opt.step()
"""
)
OWN_FUNCTION = """
model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    opt.zero_grad()
    loss_a = Spoil.apply(model(torch.randn(8, 4)), step == BAD).square().mean()
    loss_a.backward()  # HERE
    loss_b = model(torch.randn(8, 4)).square().mean() + 7
    loss_b.backward()
    opt.step()
"""
THE_LAST = """
model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    opt.zero_grad()
    for part in range(2):
        loss_a = model(torch.randn(8, 4)).square().mean() + 7
        loss_a.backward()
    loss_b = Spoil.apply(model(torch.randn(8, 4)), step == BAD).square().mean()
    loss_b.backward()  # HERE
    opt.step()
"""
NAN_IN_THE_SECOND = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)
    def forward(self, x):
        return self.inner(x) / x.abs().amax(1, keepdim=True)  # HERE
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    opt.zero_grad()
    loss_a = model(torch.randn(8, 4)).square().mean()
    loss_b = model(without_row(torch.randn(8, 4), step == BAD)).square().mean()
    loss_a.backward()
    loss_b.backward()
    opt.step()
"""
WEIGHTS = """
print(json.dumps([value for p in model.parameters() for value in p.flatten().tolist()]))
"""


def lines_of(text: str, mark: str) -> list[int]:
    return [number for number, line in enumerate(text.splitlines(), 1) if re.search(mark, line)]


def event_of(outcome: Outcome, rank: int = 0) -> dict[str, Any]:
    assert set(outcome.codes) == {0}, outcome.errors
    assert outcome.events("guard_failed", rank) == []
    (event,) = outcome.events("nonfinite", rank)
    return event


def one_of_several(event: dict[str, Any]) -> list[str]:
    return [sentence for sentence in event["evidence"] if "backward calls" in sentence]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "mark", "op", "step"),
    [
        (LOSS_CODE, "# HERE$", "sqrt", 2),
        (LOSS_CODE, "# HERE$", "sqrt", 0),
        (IN_MODULE, "# MODULE$", "sqrt", 2),
        (IN_MODULE, "# MODULE$", "sqrt", 0),
        (FORWARDS_FIRST, "# MODULE$", "sqrt", 2),
        (OWN_FUNCTION, "# HERE$", None, 2),
        (THE_LAST, "# HERE$", None, 3),
    ],
    ids=["loss code", "its first step", "module", "its first step too", "forwards first", "function", "the last"],
)
def test_line_and_loss_are_those_of_the_backward_that_was_bad(
    run: Runner, body: str, mark: str, op: str | None, step: int
) -> None:
    text = HEAD + body.replace("BAD", str(step))
    event = event_of(run(text, env={"MODEL_CHECK_GUARD": "observe"}))
    (line,) = lines_of(text, mark)
    assert (event["cause"], event["direction"], event["step"]) == ("MC402", "backward", step)
    assert (event.get("op"), event["location"]) == (op, f"train.py:{line}")
    assert 0 <= event["loss"] < 5
    assert one_of_several(event) == []


@pytest.mark.slow
def test_a_second_loss_whose_forward_came_before_the_first_backward_is_replayed(run: Runner) -> None:
    text = HEAD + NAN_IN_THE_SECOND.replace("BAD", "2")
    event = event_of(run(text, env={"MODEL_CHECK_GUARD": "observe"}))
    (line,) = lines_of(text, "# HERE$")
    assert (event["cause"], event["step"], event["loss"]) == ("MC401", 2, "inf")
    assert (event["op"], event["location"]) == ("div", f"train.py:{line}")


@pytest.mark.slow
def test_where_nothing_tells_which_one_it_was_that_is_said(run: Runner) -> None:
    """In the first step nobody knows yet which gradients an optimizer has."""
    text = HEAD + OWN_FUNCTION.replace("BAD", "0")
    event = event_of(run(text, env={"MODEL_CHECK_GUARD": "observe"}))
    first, second = lines_of(text, r"loss_.\.backward")
    assert (event["cause"], event["step"], event["location"]) == ("MC402", 0, f"train.py:{second}")
    assert event["loss"] > 5
    assert one_of_several(event) == [
        f"inferred: which of the 2 backward calls of the step (train.py:{first}, train.py:{second}) made it "
        "is not known: line and loss are those of the last"
    ]


@pytest.mark.slow
def test_healthy_losses_are_left_alone_and_so_are_their_results(run: Runner) -> None:
    text = HEAD + (LOSS_CODE + WEIGHTS).replace("BAD", "-1")
    watched, alone = (run(text, env={"MODEL_CHECK_GUARD": guard}) for guard in ("observe", "off"))
    assert watched.codes == alone.codes == [0]
    assert watched.events("nonfinite") == watched.events("nonfinite_received") == watched.events("guard_failed") == []
    assert last_json(watched.outputs[0]) == last_json(alone.outputs[0])


@pytest.mark.slow
def test_halt_names_the_backward_that_was_bad_and_refuses_the_step(run: Runner) -> None:
    text = HEAD + OWN_FUNCTION.replace("BAD", "2")
    outcome = run(text, env={"MODEL_CHECK_GUARD": "halt"})
    assert outcome.codes == [1] and "step 2 is not applied" in outcome.errors[0]
    (event,) = outcome.events("nonfinite")
    assert event["location"] == f"train.py:{lines_of(text, '# HERE$')[0]}" and event["loss"] < 5


def test_what_a_device_answers_too_late_is_of_one_of_several() -> None:
    places = tuple(Place("train.py", line, "main", "train.py") for line in (12, 15, 15))
    hit = replace(Hit.too_late(7.5, (), places[-1], OwnShare("gradient of bias")), one_of=places)
    report = report_of(hit, History(), rate=0.1)
    assert report is not None and report.location == "train.py:15"
    assert report.evidence[-1] == (
        "inferred: which of the 3 backward calls of the step (train.py:12, train.py:15) made it "
        "is not known: line and loss are those of the last"
    )
    alone = report_of(replace(hit, one_of=places[:1]), History(), rate=0.1)
    assert alone is not None and one_of_several(alone.body()) == []


DDP = """
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    opt.zero_grad()
    with FIRST:
        a = model(torch.randn(8, 4)) * (0 if step == BAD and rank == 1 else 1)
        loss_a = torch.sqrt(a.square().sum())  # HERE
        loss_a.backward()
    loss_b = model(torch.randn(8, 4)).square().mean() + 7
    loss_b.backward()
    opt.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["model.no_sync()", "torch.enable_grad()"], ids=["accumulated", "exchanged twice"])
def test_the_guilty_rank_of_two_has_the_line_and_the_loss_of_its_bad_backward(run: Runner, first: str) -> None:
    text = HEAD + DDP.replace("FIRST", first).replace("BAD", "2")
    outcome = run(text, world=2, env={"MODEL_CHECK_GUARD": "observe"})
    event = event_of(outcome, rank=1)
    (line,) = lines_of(text, "# HERE$")
    assert (event["cause"], event["op"], event["step"], event["loss"]) == ("MC402", "sqrt", 2, 0.0)
    assert event["location"] == f"train.py:{line}" and one_of_several(event) == []
    # Where the first backward has exchanged it already, rank 0 brings it to the second exchange: it was not the first.
    (finding,) = examine(outcome.run_dir, live=False).findings
    assert (finding.code, finding.ranks, finding.victims) == ("MC402", [1], [0])
    assert finding.location == f"train.py:{line}" and "observed: loss 0.0, gradient norm nan" in finding.evidence


@pytest.mark.slow
@pytest.mark.parametrize("first", ["model.no_sync()", "torch.enable_grad()"], ids=["accumulated", "exchanged twice"])
def test_two_healthy_ranks_say_nothing(run: Runner, first: str) -> None:
    text = HEAD + DDP.replace("FIRST", first).replace("BAD", "-1")
    outcome = run(text, world=2, env={"MODEL_CHECK_GUARD": "observe"})
    assert outcome.codes == [0, 0], outcome.errors
    for rank, name in itertools.product(range(2), ("nonfinite", "nonfinite_received", "guard_failed")):
        assert outcome.events(name, rank) == []


WITHOUT_OPTIMIZER = """
model = nn.Linear(4, 2)
alive = []
for step in range(600):
    torch.sqrt(model(torch.randn(8, 4)).square().sum(1) + 1).mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
            CLEAR
    if step % 200 == 199:
        alive.append(sum(type(thing) is torch.Tensor for thing in gc.get_objects()))
print(json.dumps(alive))
"""


@pytest.mark.slow
@pytest.mark.parametrize("clear", ["p.grad = None", "p.grad.zero_()"])
def test_a_script_that_updates_its_weights_by_itself_keeps_nothing_alive(run: Runner, clear: str) -> None:
    outcome = run(HEAD + WITHOUT_OPTIMIZER.replace("CLEAR", clear), env={"MODEL_CHECK_GUARD": "observe"})
    assert outcome.codes == [0], outcome.errors
    first, second, third = last_json(outcome.outputs[0])
    assert first == second == third
