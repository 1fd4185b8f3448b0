"""Scripts that see the bad number themselves and stop: it is told as if they had gone on, and they end as they would.

Each test is one short script in processes of its own, as `model-check run` starts them; the line to be named is marked.
"""

from __future__ import annotations

from typing import Any

import pytest

from model_check.diagnose import examine
from model_check.record import Finding
from tests.blackbox.observed_runs import Outcome, Runner

HEAD = """
import math, os, sys
import torch
from torch import distributed as dist, nn
from torch.nn import functional as F
torch.manual_seed(0)
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
def spread(model):
    return nn.parallel.DistributedDataParallel(model) if world > 1 else model
guilty = rank == world - 1
"""

# The forward divides by 0 in step 3, on the last rank.
FORWARD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 1)
    def forward(self, x, below):
        return self.outer(self.inner(x) / below)  # HERE
model = spread(Net())
opt = torch.optim.SGD(model.parameters(), lr=0.01)
def train(step):
    below = torch.ones(6, 1)
    below[2] = float(not (step == 3 and guilty))
    loss = model(torch.randn(6, 4), below).square().mean()
    BEFORE
    opt.zero_grad()
    loss.backward()
    AFTER
    opt.step()
    APPLIED
for step in range(5):
    train(step)
"""

# The loss is finite, and a root has an infinite slope.
BACKWARD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4, bias=False), nn.Linear(4, 1)
    def forward(self, x):
        h = self.inner(x)
        return self.outer(h) + h.square().sum(1, keepdim=True).sqrt()  # HERE
model = spread(Net())
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    x = torch.randn(6, 4)
    x[2] *= float(not (step == 3 and guilty))
    loss = model(x).square().mean()
    opt.zero_grad()
    loss.backward()
    AFTER
    opt.step()
"""

LOSS_CODE = """
model = spread(nn.Linear(4, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
def refuse(loss):
    if not torch.isfinite(loss):
        raise FloatingPointError(f"loss is {float(loss)}")
for step in range(5):
    labels = torch.full((6,), -100) if (step, guilty) == (3, True) else torch.arange(6) % 3
    loss = F.cross_entropy(model(torch.randn(6, 4)), labels)  # HERE
    refuse(loss)
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
def spread(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
"""

# It leaves bad batches out by itself, and then something else goes wrong.
GOES_ON = """
class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, number):
        return {"good": torch.randn(6, 4)}["bad" if (WHERE, number) == ("data", 3) else "good"], number
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)
    def forward(self, x, number):
        return self.inner({"good": x}["bad" if (WHERE, number) == ("forward", 3) else "good"])
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for x, number in torch.utils.data.DataLoader(Batches(), batch_size=None):
    weights = torch.full((6,), float(number != 2))
    loss = (model(x, number).squeeze(1).square() * weights).sum() / weights.sum()
    if not math.isfinite(loss.item()):
        continue
    loss.backward()
    opt.step()
"""

RAISE = 'if not math.isfinite(loss.item()): raise ValueError("loss is nan")'
EXIT = 'if not math.isfinite(loss.item()): print("Loss is nan, stopping training"); sys.exit(3)'
ASSERT = "assert torch.isfinite(loss)"
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)"
OBSERVED = {"MODEL_CHECK_GUARD": "observe"}


def forward(*, before: str = "", after: str = "", applied: str = "") -> str:
    words = {"BEFORE": before, "AFTER": after, "APPLIED": applied}
    text = HEAD + FORWARD
    for word, statement in words.items():
        text = text.replace(word, statement or "pass")
    return text


def backward(after: str) -> str:
    return HEAD + BACKWARD.replace("AFTER", after)


def here(text: str) -> str:
    return f"train.py:{next(n for n, line in enumerate(text.splitlines(), 1) if line.endswith('# HERE'))}"


def told(outcome: Outcome, rank: int) -> list[dict[str, Any]]:
    """What the rank had to say in the end."""
    assert outcome.events("guard_failed", rank) == []
    return [event for event in outcome.events("nonfinite", rank) if not event.get("preliminary")]


def verdict(outcome: Outcome) -> list[Finding]:
    return examine(outcome.run_dir, live=False).findings


ANOMALY = "import torch; torch.autograd.set_detect_anomaly(True)" + backward("pass")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code", "error", "world"),
    [
        (forward(before=RAISE), "MC401", "ValueError: loss is nan", 2),
        (forward(before=RAISE), "MC401", "ValueError: loss is nan", 1),
        (forward(after=RAISE), "MC401", "ValueError: loss is nan", 2),
        (forward(before=ASSERT), "MC401", "AssertionError", 2),
        (forward(after=ASSERT), "MC401", "AssertionError", 1),
        (forward(applied=RAISE), "MC401", "ValueError: loss is nan", 2),
        (HEAD + LOSS_CODE, "MC408", "FloatingPointError: loss is nan", 2),
        (ANOMALY, "MC402", "RuntimeError: Function 'PowBackward0' returned nan values in its 0th output.", 2),
        (ANOMALY, "MC402", "RuntimeError: Function 'PowBackward0' returned nan values in its 0th output.", 1),
    ],
)
def test_the_guilty_rank_stops_by_itself(run: Runner, text: str, code: str, error: str, world: int) -> None:
    outcome = run(text, env=OBSERVED, world=world)
    guilty = world - 1
    assert outcome.codes[guilty] == 1 and error in outcome.errors[guilty]
    (event,) = told(outcome, guilty)
    assert (event["cause"], event["step"], event["location"]) == (code, 3, here(text))
    assert event["deterministic"] is True
    (found,) = verdict(outcome)
    assert (found.code, found.ranks, found.victims, found.step) == (code, [guilty], list(range(guilty)), 3)
    assert (found.severity, found.location, found.certainty) == ("error", here(text), "proven")
    ended = found.facts["ended_by"]
    assert (ended["ranks"], ended["exception"]) == ([guilty], error.split(":")[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code"), [(forward(after=CLIP), "MC401"), (backward(CLIP), "MC402")], ids=["forward", "backward"]
)
@pytest.mark.parametrize("world", [1, 2])
def test_every_rank_stops_at_the_norm_and_the_guilty_one_is_named(
    run: Runner, text: str, code: str, world: int
) -> None:
    outcome = run(text, env=OBSERVED, world=world)
    assert outcome.codes == [1] * world
    assert all("The total norm of order 2.0" in errors for errors in outcome.errors)
    assert all(told(outcome, rank) == [] for rank in range(world - 1))
    (found,) = verdict(outcome)
    assert (found.code, found.ranks, found.victims, found.step) == (code, [world - 1], list(range(world - 1)), 3)
    assert (found.severity, found.location, found.certainty) == ("error", here(text), "proven")
    ended = found.facts["ended_by"]
    assert (ended["ranks"], ended["exception"]) == (list(range(world)), "RuntimeError")
    assert ended["message"].startswith("The total")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (FORWARD.replace("BEFORE", "pass").replace("AFTER", CLIP).replace("APPLIED", "pass"), "MC401", "loss nan"),
        (BACKWARD.replace("AFTER", CLIP), "MC402", "before any exchange"),
    ],
    ids=["forward", "backward"],
)
def test_of_a_sharded_model_the_rank_is_named(run: Runner, body: str, code: str, said: str) -> None:
    outcome = run(HEAD + SHARDED + body, env=OBSERVED, world=2)
    assert outcome.codes == [1, 1], outcome.errors
    (found,) = verdict(outcome)
    assert (found.code, found.ranks, found.victims, found.step) == (code, [1], [0], 3)
    assert said in " ".join(found.evidence)
    assert (found.facts["ended_by"]["ranks"], found.facts["ended_by"]["exception"]) == ([0, 1], "RuntimeError")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "statement"), [("before", EXIT), ("after", EXIT), ("after", EXIT.replace("sys.exit", "raise SystemExit"))]
)
def test_an_exit_keeps_its_code_and_what_is_bad_is_written_before_it(run: Runner, when: str, statement: str) -> None:
    text = forward(**{when: statement})
    outcome = run(text, env=OBSERVED)
    assert outcome.codes == [3] and outcome.outputs[0].split("\n")[0] == "Loss is nan, stopping training"
    (event,) = told(outcome, 0)
    assert (event["cause"], event["step"], event["action"], event["location"]) == ("MC401", 3, "stopped", here(text))
    assert "grad_norm" not in event, "it was never taken"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "statement"),
    [
        ("before", 'if step == 2 and guilty: raise ValueError(f"loss {loss.item()} > 0.001")'),
        ("after", 'if step == 2 and guilty: {}["labels"]'),
        ("applied", 'if step == 2 and guilty: raise ValueError("loss is nan, or so it says")'),
    ],
)
def test_a_step_whose_numbers_are_finite_is_not_to_blame(run: Runner, when: str, statement: str) -> None:
    outcome = run(forward(**{when: statement}), env=OBSERVED)
    assert outcome.codes == [1]
    assert told(outcome, 0) == [] and outcome.events("nonfinite") == []
    (found,) = verdict(outcome)
    assert (found.code, found.ranks, found.severity) == ("MC301", [0], "error")
    assert not any("finite" in said for said in found.evidence)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["data", "forward"])
def test_a_loss_that_the_script_went_on_from_is_not_to_blame(run: Runner, where: str) -> None:
    outcome = run(HEAD + GOES_ON.replace("WHERE", f'"{where}"'), env=OBSERVED)
    assert outcome.codes == [1] and "KeyError: 'bad'" in outcome.errors[0]
    assert outcome.events("guard_failed") == [] and outcome.events("nonfinite") == []
    assert [found.code for found in verdict(outcome)] == ["MC301"]


@pytest.mark.slow
def test_a_rank_that_is_told_to_end_meanwhile_ends_with_its_own_code(run: Runner) -> None:
    """Its forward takes a minute when it is run once more; what is known without it has been written."""
    late = """before = Net.forward
def late(self, x):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
for step"""
    text = "import signal, time" + backward(f"Net.forward = late if step == 3 else before; {CLIP}")
    text = text.replace("for step", late, 1)
    outcome = run(text, env=OBSERVED, timeout=50)
    assert outcome.codes == [1] and "RuntimeError: The total norm" in outcome.errors[0]
    (event,) = outcome.events("nonfinite")
    assert (event["cause"], event["step"], event["preliminary"]) == ("MC402", 3, True)
    (found,) = verdict(outcome)
    assert (found.code, found.ranks, found.severity, found.certainty) == ("MC402", [0], "error", "observed")


@pytest.mark.slow
def test_a_group_that_is_destroyed_on_the_way_out_was_one(run: Runner) -> None:
    """Nothing of rank 0 was looked at in the step: what it holds may be a peer's, although it is alone by now."""
    unseen = "from model_check.numerics.step_watchers import of_this_thread; of_this_thread().guard._own._looked = None"
    tidy = f"""try:
        if rank == 0: {unseen}
        {CLIP}
    except RuntimeError:
        dist.destroy_process_group()
        raise"""
    outcome = run(backward(tidy), env=OBSERVED, world=2)
    assert outcome.codes[1] == 1 and told(outcome, 0) == []
    (found,) = verdict(outcome)
    assert (found.code, found.ranks, found.victims, found.step) == ("MC402", [1], [0], 3)


@pytest.mark.slow
def test_an_exit_that_somebody_catches_was_none(run: Runner) -> None:
    caught = f"""try:
        {EXIT}
    except SystemExit:
        return"""
    outcome = run(forward(before=caught), env=OBSERVED)
    assert outcome.codes == [0]
    assert told(outcome, 0) == [], "it is not looked into"
    assert [event["action"] for event in outcome.events("nonfinite")] == ["stopped"], (
        "dropped where the rank ends with 0"
    )
