"""The guard under scripts of every build: closures, several optimizers, loss modules, chains of modules, odd results.

Each test is one short script in a process of its own, as `model-check run` starts it; the line to be named is marked.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.blackbox.observed_runs import Outcome, Runner

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
"""

CLOSURE = """
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    x = torch.randn(8, 4)
    weights = torch.ones(8) if step != 3 else torch.zeros(8)
    def closure():
        opt.zero_grad()
        error = (model(x).squeeze(1) - 1).square()
        loss = (error * weights).sum() / weights.sum()  # HERE
        loss.backward()
        return loss
    opt.step(closure)
print("weights", float(model.weight.sum()))
"""

TWO_OPTIMIZERS = """
embed, head = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 4)
first = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
second = torch.optim.SparseAdam(embed.parameters(), lr=0.01)
for step in range(6):
    ids, weights = torch.arange(8), torch.ones(8) if step != 4 else torch.zeros(8)
    losses = F.cross_entropy(head(embed(ids)), ids % 4, reduction="none")
    loss = (losses * weights).sum() / weights.sum()  # HERE
    embed.zero_grad()
    loss.backward()
    first.step()
    second.step()
"""

LOSS_MODULE = """
class Likelihood(nn.Module):
    def forward(self, chances, labels):
        return -torch.log(chances.gather(1, labels[:, None])).mean()  # HERE
model, criterion = nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), Likelihood()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    x = torch.randn(6, 4) * (1e5 if step == 2 else 1)
    loss = criterion(model(x), torch.arange(6) % 3)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

MODULE_BEFORE = """
class Standard(nn.Module):
    def forward(self, x):
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)  # HERE
prepare, model = Standard(), nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    x = torch.randn(6, 4)
    if step == 2:
        x[1] = 7.0
    x = prepare(x)
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

DATACLASS = """
from dataclasses import dataclass
@dataclass(slots=True)
class Out:
    logits: torch.Tensor
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
    def forward(self, x, scale):
        h = self.inner(x)
        h.div_(scale)  # HERE
        return Out(h)
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    scale = torch.ones(6, 1)
    scale[4] = float(step != 2)
    loss = F.cross_entropy(model(torch.randn(6, 4), scale).logits, torch.arange(6) % 3)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

TARGETS = """
model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    y = torch.randn(6, 2)
    y[3, 1] = float("inf") if step == 2 else 0.0
    loss = F.smooth_l1_loss(model(torch.randn(6, 4)), y) + F.mse_loss(model(torch.ones(6, 4)), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

NO_EPS = """
model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4))
opt = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.0)
for step in range(4):
    ids = torch.arange(8) + step
    loss = F.cross_entropy(model(ids), ids % 4)  # HERE
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

HARMLESS = """
model = nn.Linear(4, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    labels = torch.arange(6) % 3 if step % 2 == 0 else torch.full((6,), -100)
    loss = F.cross_entropy(model(torch.randn(6, 4)), labels)  # HERE
    opt.zero_grad()
    loss.backward()
    opt.step()
print("finite", bool(torch.isfinite(model.weight).all()))
"""

HARMLESS_PART = """
model = nn.Linear(4, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    for part in range(3):
        labels = torch.full((6,), -100) if (step, part) == (2, BAD) else torch.arange(6) % 3
        loss = F.cross_entropy(model(torch.randn(6, 4)), labels)  # HERE
        loss.backward()
    opt.step()
    opt.zero_grad()
print("finite", bool(torch.isfinite(model.weight).all()))
"""

THROWN_AWAY = """
model = nn.Linear(4, 3)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    for part in range(3):
        loss = model(torch.randn(6, 4)).square().mean() * (float("nan") if (step, part) == (2, 1) else 1.0)
        loss.backward()
        if not torch.isfinite(loss):
            opt.zero_grad()
    opt.step()
    opt.zero_grad()
print("finite", bool(torch.isfinite(model.weight).all()))
"""

FIRST_LAYER_ONLY = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4, bias=False), nn.Linear(4, 1)
    def forward(self, x):
        h = self.inner(x)
        return self.outer(h) + h.square().sum(1, keepdim=True).sqrt()  # HERE
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    x = torch.randn(6, 4)
    if step == 3:
        x[2] = 0.0
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

# An infinity that stays in a single weight, in a step that reads another part of the gradients: the norm is infinite,
# clipping makes 0 of all others, and NaN of this one.
CLIPS = """
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from model_check.numerics.step_watchers import of_this_thread
model = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 512, bias=False))
def spoil(gradient):
    gradient = gradient.clone()
    gradient[-1, -1] = float("inf") if step == 3 else 0.0
    return gradient
model[1].weight.register_hook(spoil)
weights = list(model.parameters())
opt = torch.optim.SGD(weights, lr=0.01)
of_this_thread().guard._own.in_turns = ("cpu",)
for step in range(6):
    opt.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    TAKEN
    opt.step()
"""

# The pole is in what a loss adds, not in the term that it begins with.
SECOND_TERM = """
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    opt.zero_grad()
    out = model(torch.randn(8, 4))
    goal = out.detach() if step == 3 else torch.zeros_like(out)
    loss = out.square().mean()
    loss = loss + 0.1 * (out - goal).square().sum(-1).sqrt().mean()  # HERE
    loss.backward()
    opt.step()
"""

# The loss is 0/0 whatever the scale; halving it ten times in a row is the consequence, not the cause.
SCALED_MASK = """
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(16):
    opt.zero_grad()
    error = model(torch.randn(8, 4)).square()
    mask = torch.full_like(error, 1.0 if step < 4 else 0.0)
    loss = (error * mask).sum() / mask.sum()  # HERE
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
"""

# A model of torch's own modules has no line: the call is the nearest, not where the script stands when it is told.
SCALED_OVERFLOW = """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(16):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(torch.randn(8, 4) * (1.0 if step < 4 else 1e6))  # HERE
    scaler.scale(out.float().square().mean()).backward()
    scaler.step(opt)
    scaler.update()
"""

# One update with a rate of 10 makes every weight about 10: the next forward leaves float16. So does a large input.
RATE_IN_HALF = """
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
opt = torch.optim.Adam(model.parameters(), lr=RATE)
for step in range(4):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(torch.randn(8, 16) * (LARGE if step == 1 else 1.0))
    (out.float() - 1).square().mean().backward()
    opt.step()
"""

ALONE_ON_A_RANK = """
from torch.nn.utils import clip_grad_norm_
from model_check.numerics.step_watchers import of_this_thread
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
class Lone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()
    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[-1, -1] = float("inf") if (step, rank) == (3, 1) else 0.0
        return gradient
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(4, 512), nn.Parameter(torch.randn(512, 512) / 32)
    def forward(self, x):
        return self.first(x) @ Lone.apply(self.weight)
model = nn.parallel.DistributedDataParallel(Net())
opt = torch.optim.SGD(model.parameters(), lr=0.01)
of_this_thread().guard._own.in_turns = ("cpu",)
for step in range(5):
    opt.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
torch.distributed.destroy_process_group()
"""

SAMPLE_BY_SAMPLE = """
from torch.func import functional_call, grad, vmap
from torch.nn.utils import get_total_norm
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
def clipped(weights, x):
    gradients = grad(lambda weights: functional_call(model, weights, (x[None],)).square().mean())(weights)
    norm = get_total_norm(list(gradients.values()), foreach=False)
    return {name: gradient / torch.clamp(norm, min=1.0) for name, gradient in gradients.items()}
for step in range(3):
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    for name, gradients in vmap(clipped, (None, 0))(weights, torch.randn(8, 4)).items():
        model.get_parameter(name).grad = gradients.mean(0)
    opt.step()
opt.zero_grad()
(model(torch.randn(8, 4)).sum() / torch.zeros(()).sum()).backward()  # HERE
opt.step()
"""


def line_of(body: str) -> int:
    return next(number for number, line in enumerate((HEAD + body).splitlines(), 1) if line.endswith("# HERE"))


def event_of(outcome: Outcome) -> dict[str, Any]:
    assert outcome.codes == [0], outcome.errors
    assert outcome.events("guard_failed") == []
    (event,) = outcome.events("nonfinite")
    return event


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "cause", "op", "step", "function"),
    [
        (CLOSURE, "MC408", "div", 3, "closure"),
        (TWO_OPTIMIZERS, "MC408", "div", 9, "<module>"),  # two optimizers take two steps a round
        (LOSS_MODULE, "MC401", "log", 2, "forward"),
        (MODULE_BEFORE, "MC401", "div", 2, "forward"),
        (DATACLASS, "MC401", "div", 2, "forward"),
        (FIRST_LAYER_ONLY, "MC402", "sqrt", 3, "forward"),
        (SECOND_TERM, "MC402", "sqrt", 3, "<module>"),
        (SCALED_MASK, "MC408", "div", 4, "<module>"),
        (SCALED_OVERFLOW, "MC403", "cast", 4, "<module>"),
    ],
    ids=[
        "closure",
        "two optimizers",
        "loss module",
        "module before",
        "dataclass",
        "first layer only",
        "second term",
        "scaled mask",
        "scaled overflow",
    ],
)
def test_the_step_the_operation_and_the_line(
    run: Runner, body: str, cause: str, op: str, step: int, function: str
) -> None:
    event = event_of(run(HEAD + body, env={"MODEL_CHECK_GUARD": "observe"}))
    assert (event["cause"], event["op"], event["step"]) == (cause, op, step)
    assert (event["location"], event["function"]) == (f"train.py:{line_of(body)}", function)
    assert event["deterministic"] is True


@pytest.mark.slow
@pytest.mark.parametrize(
    "taken",
    [
        "clip_grad_norm_(weights, 1.0)",
        "clip_grads_with_norm_(weights, 1.0, get_total_norm([p.grad for p in weights]))",
        "[clip_grad_norm_(part, 1.0) for part in (weights[:2], [], weights[0], weights[1], weights[0], weights[2])]",
        "clip_grad_norm_(weights, 1.0); nn.Linear(4, 1)(torch.ones(1, 4)).sum().backward()",
    ],
    ids=["clip_grad_norm_", "get_total_norm", "layer by layer", "before another loss"],
)
def test_the_norm_of_a_script_that_clips_tells_what_a_part_of_its_gradients_does_not(run: Runner, taken: str) -> None:
    event = event_of(run(HEAD + CLIPS.replace("TAKEN", taken), env={"MODEL_CHECK_GUARD": "observe"}))
    assert (event["cause"], event["step"], event["grad_norm"]) == ("MC402", 3, "inf")


@pytest.mark.slow
def test_what_follows_the_first_module_is_not_said_to_be_before_it(run: Runner) -> None:
    event = event_of(run(HEAD + SCALED_OVERFLOW, env={"MODEL_CHECK_GUARD": "observe"}))
    assert (event["module"], event["ranges"]) == ("0", [])
    assert "steps in a row were left out" in event["evidence"][0]
    assert "train.py" not in event["evidence"][1]


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "large", "to_blame"), [("10.0", "1.0", True), ("1e-3", "1e6", False)])
def test_a_rate_that_no_format_would_bear_is_named(run: Runner, rate: str, large: str, to_blame: bool) -> None:
    event = event_of(
        run(HEAD + RATE_IN_HALF.replace("RATE", rate).replace("LARGE", large), env={"MODEL_CHECK_GUARD": "observe"})
    )
    assert (event["cause"], event["step"]) == ("MC403", 1)
    assert (event["fix"][0] == "lower the learning rate") == to_blame
    said = [line for line in event["evidence"] if "learning rate" in line]
    assert len(said) == (2 if to_blame else 0)
    assert not said or said[0].startswith("observed: after 1 update at a learning rate of 10, 2.weight (deviation 8.")


@pytest.mark.slow
def test_a_rank_whose_own_backward_does_it_again_is_named_although_its_part_did_not_show_it(run: Runner) -> None:
    outcome = run(HEAD + ALONE_ON_A_RANK, env={"MODEL_CHECK_GUARD": "observe"}, world=2)
    assert outcome.codes == [0, 0], outcome.errors
    assert [outcome.events("nonfinite", 0), outcome.events("nonfinite_received", 1)] == [[], []]
    (event,), (received,) = outcome.events("nonfinite", 1), outcome.events("nonfinite_received", 0)
    assert (event["cause"], event["step"], event["grad_norm"], event["deterministic"]) == ("MC402", 3, "inf", True)
    assert received["step"] == 3


@pytest.mark.slow
def test_a_norm_inside_vmap_has_no_number_to_be_looked_at(run: Runner) -> None:
    """What is batched there looks like a plain tensor; asking it for its number raises."""
    event = event_of(run(HEAD + SAMPLE_BY_SAMPLE, env={"MODEL_CHECK_GUARD": "observe"}))
    assert (event["cause"], event["step"]) == ("MC408", 3)
    assert event["location"].endswith(f":{line_of(SAMPLE_BY_SAMPLE)}")


@pytest.mark.slow
def test_a_target_that_is_not_finite_is_a_bad_sample(run: Runner) -> None:
    event = event_of(run(HEAD + TARGETS, env={"MODEL_CHECK_GUARD": "observe"}))
    assert (event["cause"], event["step"], event["sample_ids"]) == ("MC404", 2, [3])
    assert "is given a target that is not finite, of sample 3" in " ".join(event["evidence"])


@pytest.mark.slow
def test_an_update_that_divides_by_nothing_is_blamed_and_not_the_next_forward(run: Runner) -> None:
    event = event_of(run(HEAD + NO_EPS, env={"MODEL_CHECK_GUARD": "observe"}))
    assert (event["cause"], event["step"], event["tensor"]) == ("MC401", 1, "parameter 0.weight")
    assert (
        "observed: eps of the optimizer is 0: where a gradient has always been 0, its update is 0/0"
        in (event["evidence"])
    )
    assert event["fix"] == ["give the optimizer an eps above 0, such as 1e-8"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["observe", "halt"])
def test_a_loss_of_nan_that_spoils_nothing_is_told_once_and_stops_nobody(run: Runner, mode: str) -> None:
    outcome = run(HEAD + HARMLESS, env={"MODEL_CHECK_GUARD": mode})
    event = event_of(outcome)
    assert outcome.outputs[0].split() == ["finite", "True"]
    assert (event["cause"], event["step"], event["action"]) == ("MC408", 1, "observe")
    assert "observed: every gradient is still finite, so the step spoils no weight" in event["evidence"]


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_a_loss_of_nan_of_any_part_of_a_step_is_told(run: Runner, part: int) -> None:
    event = event_of(run(HEAD + HARMLESS_PART.replace("BAD", str(part)), env={"MODEL_CHECK_GUARD": "observe"}))
    assert (event["cause"], event["step"]) == ("MC408", 2)
    assert "observed: every gradient is still finite, so the step spoils no weight" in event["evidence"]


@pytest.mark.slow
def test_a_part_of_a_step_that_the_script_throws_away_is_its_own_business(run: Runner) -> None:
    outcome = run(HEAD + THROWN_AWAY, env={"MODEL_CHECK_GUARD": "observe"})
    assert outcome.outputs[0].split() == ["finite", "True"]
    assert outcome.events("nonfinite") == [] and outcome.events("guard_failed") == []


@pytest.mark.slow
def test_halt_refuses_the_step_of_a_closure(run: Runner) -> None:
    outcome = run(HEAD + CLOSURE, env={"MODEL_CHECK_GUARD": "halt"})
    assert outcome.codes == [1] and "weights" not in outcome.outputs[0]
    refused = "step 3 is not applied: this rank's own pass made its gradients non-finite"
    where = f"div at train.py:{line_of(CLOSURE)} in closure; the run was started with --guard halt"
    assert outcome.errors[0].splitlines()[-1] == f"model_check.errors.NumericsError: [MC408] rank 0: {refused}: {where}"
    shown = [
        line
        for line in outcome.errors[0].splitlines()
        if "model_check/blackbox" in line or "model_check/numerics" in line
    ]
    assert len(shown) == 1 and 'train.py", line' in outcome.errors[0], "the script's lines, and one of ours"
    assert [event["action"] for event in outcome.events("nonfinite")] == ["halt"]
