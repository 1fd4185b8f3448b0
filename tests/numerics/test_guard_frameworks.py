"""Scripts that hand their loop to a framework: the framework calls backward, and a step may be run as DDP's forward.

The framework is a file that counts as installed. It does what Lightning and transformers' Trainer do, without them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from model_check.diagnose import examine
from model_check.numerics.causes import History
from tests.blackbox.observed_runs import Outcome, Runner

FRAMEWORK = """
import torch

def run_as_forward(wrapper, original, method, *args):
    # Lightning's forward redirection
    forward = original.forward
    def wrapped_forward(*given):
        original.forward = forward
        result = getattr(original, method)(*given)
        wrapper.require_backward_grad_sync = result is not None  # else DDP has had its backward
        return result
    original.forward = wrapped_forward
    result = wrapper(*args)
    wrapper.require_backward_grad_sync = True
    return result

def backward_inside(wrapper, loss):
    wrapper.require_forward_param_sync = True
    wrapper.reducer._rebuild_buckets()
    wrapper.reducer.prepare_for_backward([])
    loss.backward()

class Module(torch.nn.Module):
    def log(self, name, value):
        self.logged = name, float(value)

def fit(net, data, opt, wrapper=None):
    for number, batch in enumerate(data):
        if wrapper is None:
            loss = net.training_step(batch, number)
        else:
            loss = run_as_forward(wrapper, net, "training_step", batch, number)
        if loss is not None:
            opt.zero_grad()
            apply(loss / 1, opt)
        if number % 20 == 0:
            with torch.no_grad():
                run_as_forward(wrapper, net, "validation_step", batch) if wrapper is not None else None

def apply(number, opt):
    number.backward()
    opt.step()

def log_of(number):
    return torch.log(number)

class Divides(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x) / x.sum()
"""

HEAD = """
import sys, os
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages"))
import framework, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
rank = int(os.environ["RANK"])
BAD = int(os.environ["WORLD_SIZE"]) - 1
"""

TRAINING_STEP = """
class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head, self.empty = nn.Linear(4, 8), nn.Linear(8, 3), False

    def forward(self, x):
        h = self.inner(x).relu()
        return self.head(h / (h.detach().sum() * (0 if self.empty else 1)))  # MODULE

class Net(framework.Module):
    def __init__(self):
        super().__init__()
        self.body, self.calls = Body(), 0

    def training_step(self, batch, number):
        x, y = batch
        self.calls += 1
        guilty = rank == BAD and number == 5
        if guilty and FAULT == "SAMPLE":
            x[3] = float("nan")
        self.body.empty = guilty and FAULT == "MODULE"
        logits = self.body(x)  # SAMPLE
        size = logits.square().mean() * (0 if guilty and FAULT in ("LOG", "ROOT") else 1)
        loss = F.cross_entropy(logits, torch.full_like(y, -100) if guilty and FAULT == "LABELS" else y)  # LABELS
        if FAULT == "LOG":
            loss = loss + torch.log(size)  # LOG
        if FAULT == "ROOT":
            loss = loss + torch.sqrt(size)  # ROOT
        self.log("loss", loss)
        self.log(f"{rank}", loss)
        if not MANUAL:
            return loss
        opt.zero_grad()
        framework.backward_inside(wrapper, loss)
        opt.step()

    def validation_step(self, batch):
        self.log("validation", self.body(batch[0]).sum())

def main():
    global wrapper, opt
    unrelated = 512 / 8, torch.log(torch.ones(3)), torch.sqrt(torch.ones(3))
    unrelated = F.cross_entropy(torch.ones(1, 2), torch.ones(1, 2))
    torch.manual_seed(rank)
    data = [(torch.randn(6, 4), torch.arange(6) % 3) for _ in range(STEPS)]
    wrapper = None
    if BAD:
        dist.init_process_group("gloo")
    net = Net()
    if BAD:
        wrapper = nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    framework.fit(net, data, opt, wrapper)
    print("calls", net.calls, repr(float(net.body.head.weight.sum())))
    if BAD:
        dist.destroy_process_group()

main()
"""


@pytest.fixture(autouse=True)
def framework(tmp_path: Path) -> None:
    folder = tmp_path / "user" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "framework.py").write_text(FRAMEWORK)


def training_step(fault: str, *, manual: bool = False, steps: int = 8) -> str:
    return HEAD + f"FAULT, MANUAL, STEPS = {fault!r}, {manual}, {steps}\n" + TRAINING_STEP


def line_of(text: str, mark: str) -> str:
    (line,) = (number for number, line in enumerate(text.splitlines(), 1) if line.endswith(f"# {mark}"))
    return f"train.py:{line}"


def events_of(outcome: Outcome, rank: int = 0) -> list[dict[str, Any]]:
    assert set(outcome.codes) == {0}, outcome.errors
    assert outcome.events("guard_failed", rank) == [] and outcome.events("recording_failed", rank) == []
    return outcome.events("nonfinite", rank)


FAULTS = [
    ("SAMPLE", "MC404", None, [3]),
    ("MODULE", "MC401", "div", []),
    ("LOG", "MC401", "log", []),
    ("ROOT", "MC402", "sqrt", []),
    ("LABELS", "MC408", "nllloss", []),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "op", "samples", "manual"),
    [*((*fault, False) for fault in FAULTS), (*FAULTS[0], True), (*FAULTS[3], True)],
)
def test_a_step_that_is_run_as_the_forward_of_ddp_is_looked_into(
    run: Runner, fault: str, code: str, op: str | None, samples: list[int], manual: bool
) -> None:
    text = training_step(fault, manual=manual)
    outcome = run(text, world=2, env={"MODEL_CHECK_GUARD": "observe"})
    (event,) = events_of(outcome, rank=1)
    assert (event["cause"], event.get("op"), event["step"], event["sample_ids"]) == (code, op, 5, samples)
    assert event["location"] == line_of(text, fault)
    assert events_of(outcome, rank=0) == []
    (finding,) = examine(outcome.run_dir, live=False).findings
    assert (finding.code, finding.ranks, finding.step, finding.location) == (code, [1], 5, line_of(text, fault))
    assert all(said.startswith("calls 8 ") for said in outcome.outputs), "a training step must never be run once more"


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "code", "op", "samples"), FAULTS[2:])
def test_the_loss_code_is_not_looked_for_in_the_function_that_starts_the_framework(
    run: Runner, fault: str, code: str, op: str | None, samples: list[int]
) -> None:
    text = training_step(fault)
    (event,) = events_of(run(text, env={"MODEL_CHECK_GUARD": "observe"}))
    assert (event["cause"], event.get("op"), event["step"], event["sample_ids"]) == (code, op, 5, samples)
    assert event["location"] == line_of(text, fault)


@pytest.mark.slow
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_a_healthy_run_says_nothing_and_computes_the_same(run: Runner, manual: bool) -> None:
    text = training_step("", manual=manual, steps=70)
    outcome = run(text, world=2, env={"MODEL_CHECK_GUARD": "observe"})
    assert events_of(outcome, rank=0) == events_of(outcome, rank=1) == []
    assert examine(outcome.run_dir, live=False).findings == []
    plain = run(text, world=2, inject=False)
    assert plain.codes == [0, 0] and outcome.outputs == plain.outputs


ITS_OWN_LOSS = """
def main():
    unrelated = torch.log(torch.ones(3))
    class Net(framework.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)
        def training_step(self, batch, number):
            return framework.log_of(self.layer(batch).square().mean() * (number != 5))  # HERE
    net = Net()
    framework.fit(net, torch.randn(8, 3, 4), torch.optim.SGD(net.parameters(), lr=0.01))
main()
"""

HANDED_OVER = """
def scores(net, x):
    return torch.sqrt(net(x).square() + 1)

def train(net, opt):
    for number in range(8):
        loss = torch.log(scores(net, torch.randn(3, 4)).mean() * (number != 5))  # HERE
        framework.apply(loss, opt)

net = nn.Linear(4, 1)
train(net, torch.optim.SGD(net.parameters(), lr=0.01))
"""

IN_ONE_LINE = """
def main():
    unrelated = torch.log(torch.ones(3))
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for number in range(8):
        opt.zero_grad()
        (net(torch.randn(3, 4)).square().mean() * (number != 5)).log().backward()  # HERE
        opt.step()
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [ITS_OWN_LOSS, HANDED_OVER, IN_ONE_LINE], ids=["its own loss", "handed over", "one line"]
)
def test_the_line_of_a_logarithm(run: Runner, body: str) -> None:
    text = HEAD + body
    (event,) = events_of(run(text, env={"MODEL_CHECK_GUARD": "observe"}))
    assert (event["cause"], event["op"], event["step"]) == ("MC401", "log", 5)
    assert event["location"] == line_of(text, "HERE")


INSTALLED_MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.divides = framework.Divides()
    def forward(self, x):
        return self.divides(x)  # INSIDE
net = NET
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for number in range(8):
    opt.zero_grad()
    loss = net(torch.ones(3, 4) * (number != 5)).mean()  # CALLED
    loss.backward()
    opt.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("net", "mark"), [("Net()", "INSIDE"), ("framework.Divides()", "CALLED")])
def test_the_line_of_a_model_that_was_installed_elsewhere_is_the_scripts(run: Runner, net: str, mark: str) -> None:
    text = HEAD + INSTALLED_MODEL.replace("NET", net)
    (event,) = events_of(run(text, env={"MODEL_CHECK_GUARD": "observe"}))
    assert (event["cause"], event["op"], event["step"]) == ("MC408", "div", 5)
    assert event["location"] == line_of(text, mark)


TOO_FAST = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 10)
    def forward(self, x):
        return self.last(self.norm(self.first(x).relu()))
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e6)
for number in range(6):
    opt.zero_grad()
    logits = net(torch.randn(8, 8))
    if NORMED:
        logits = F.normalize(logits, dim=-1) + 0 * logits.square().square().square()
    F.cross_entropy(logits, torch.arange(8)).backward()
    opt.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("normed", "why"), [(False, "the loss grew with every update"), (True, "enlarges what passes")]
)
def test_a_rate_that_makes_the_derivatives_overflow_is_no_pole(run: Runner, normed: bool, why: str) -> None:
    (event,) = events_of(run(HEAD + TOO_FAST.replace("NORMED", str(normed)), env={"MODEL_CHECK_GUARD": "observe"}))
    assert event["cause"] == "MC405", event
    assert any(why in said for said in event["evidence"]), event
    assert event["fix"][0] == "lower the learning rate"


def test_the_loss_of_the_step_in_progress_counts_for_a_divergence() -> None:
    history = History()
    history.step(4.0, 1.0, 300.0)
    history.step(36.0, 50.0, 300.0)
    assert not history.diverges_from_the_start()
    assert history.diverges_from_the_start(5e5) and history.shown(5e5) == "4, 36, 5e+05"
    assert not history.diverges_from_the_start(3.0)
    assert not history.diverges_from_the_start(math.nan) and history.shown(math.nan) == "4, 36"
