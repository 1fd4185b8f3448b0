"""A foreign script's own gradients are looked at before an exchange: the rank that brings a bad number is named."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observed_runs import Outcome, Runner

from model_check.diagnose import examine
from model_check.observe.instrument.exchanges import _ADVANCE_S, _SHARE, Budget

# One number of one weight's gradient, which no layer before it feels: only a look at all gradients sees it.
SCRIPT = """
import contextlib, math, os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

way = os.environ["WAY"]
dist.init_process_group("gloo")
rank, step = dist.get_rank(), 0


class Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if step == 3 and rank == 1:
            gradient[3, 5] = math.nan
        return gradient


class Middle(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, Spoilt.apply(self.weight), self.bias)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Middle(16, 16), nn.ReLU(), nn.Linear(16, 1))
parameters = list(model.parameters())
if way == "fsdp":
    from torch.distributed.fsdp import fully_shard
    fully_shard(model[2])
    fully_shard(model)
elif way == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    model[2] = FSDP(model[2], device_id=torch.device("cpu"))
    model = FSDP(model, device_id=torch.device("cpu"))
elif way != "manual":
    model = DDP(model, gradient_as_bucket_view=way == "view")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    for micro in range(2 if way == "accumulate" else 1):
        last = micro or way != "accumulate"
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()  # HERE
    if way == "manual":
        flat = torch.cat([p.grad.reshape(-1) for p in parameters])
        dist.all_reduce(flat)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad.copy_(part.view_as(p))
    if way == "mended":
        for p in parameters:
            p.grad.nan_to_num_(0.0)
    seen = torch.tensor([float("nan")])
    dist.all_reduce(seen)  # a metric of the script's own is no gradient
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


HERE = next(n for n, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# HERE"))


def run_way(run: Runner, way: str, guard: str = "observe") -> Outcome:
    outcome = run(SCRIPT, world=2, env={"MODEL_CHECK_GUARD": guard, "WAY": way})
    assert [outcome.events("guard_failed", rank) for rank in (0, 1)] == [[], []]
    return outcome


@pytest.mark.parametrize(
    ("way", "tensor"),
    [
        ("ddp", "gradient of 2.weight"),
        ("fsdp", "gradients of 2"),
        pytest.param("view", "gradient of 2.weight", marks=pytest.mark.slow),
        pytest.param("accumulate", "gradient of 2.weight", marks=pytest.mark.slow),
        pytest.param("manual", "gradient of 2.weight", marks=pytest.mark.slow),
        pytest.param("fsdp1", "gradient of 2", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_brought_a_bad_gradient_is_named_at_its_step(run: Runner, way: str, tensor: str) -> None:
    outcome = run_way(run, way)
    assert outcome.codes == [0, 0], outcome.errors
    (event,) = outcome.events("nonfinite", rank=1)
    assert (event["step"], event["cause"], event["direction"]) == (3, "MC402", "backward")
    assert (event["tensor"], event["location"]) == (tensor, f"train.py:{HERE}")
    assert (
        f"observed: the {tensor} held a number that is not finite on this rank, before any exchange"
        in (event["evidence"])
    )
    (finding,) = examine(outcome.run_dir, live=False).findings
    assert (finding.code, finding.ranks, finding.step) == ("MC402", [1], 3)
    assert finding.victims == [0]


@pytest.mark.slow
def test_halt_refuses_the_step_on_every_rank_and_blames_the_one(run: Runner) -> None:
    outcome = run_way(run, "ddp", guard="halt")
    assert outcome.codes == [1, 1]
    assert "this rank's own pass made its gradients non-finite" in outcome.errors[1]
    assert "a peer's gradients made its gradients non-finite" in outcome.errors[0]
    (received,) = outcome.events("nonfinite_received", rank=0)
    assert received["why_not"] == "the gradients of this rank were finite before they were exchanged"


@pytest.mark.slow
def test_gradients_that_the_script_mends_are_its_own_business(run: Runner) -> None:
    outcome = run_way(run, "mended")
    assert outcome.codes == [0, 0], outcome.errors
    assert [outcome.events("nonfinite", rank) for rank in (0, 1)] == [[], []]


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-3, 2.0), st.floats(1e-6, 0.5))
def test_looking_never_takes_more_than_its_share_of_a_long_run(step_s: float, look_s: float) -> None:
    now, looks, steps = 0.0, 0, 2000
    budget = Budget(lambda: now)
    for step in range(steps):
        if budget.covers_a_step():
            assert step > 0 or looks == 0
            budget.spend(look_s)
            looks += 1
        now += step_s
    allowed = _ADVANCE_S + _SHARE * steps * step_s + look_s  # the last one may overdraw
    assert looks >= 1 and looks * look_s <= allowed
    if look_s <= _SHARE * step_s:
        assert looks == steps
