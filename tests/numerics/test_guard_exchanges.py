"""A foreign script's own gradients are looked at before an exchange: the rank that brings a bad number is named."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from model_check.blackbox import native_collectives
from model_check.diagnose import examine
from model_check.numerics.exchanges import OwnGradients
from tests.blackbox.observed_runs import Outcome, Runner

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
            batch = torch.randn(8, 16)
            if os.environ.get("SAMPLE") and step == 2 and rank == 1:
                batch[5, 3] = math.inf
            loss = model(batch).square().mean()  # CALL
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
CALL = next(n for n, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# CALL"))


def run_way(run: Runner, way: str, guard: str = "observe") -> Outcome:
    outcome = run(SCRIPT, world=2, env={"MODEL_CHECK_GUARD": guard, "WAY": way})
    assert [outcome.events("guard_failed", rank) for rank in (0, 1)] == [[], []]
    return outcome


@pytest.mark.slow
def test_a_bad_sample_is_named_where_no_rank_can_replay_its_pass(run: Runner) -> None:
    outcome = run(SCRIPT, world=2, env={"MODEL_CHECK_GUARD": "observe", "WAY": "fsdp", "SAMPLE": "1"})
    assert outcome.codes == [0, 0], outcome.errors
    (event,) = outcome.events("nonfinite", rank=1)
    assert (event["step"], event["cause"], event["sample_ids"]) == (2, "MC404", [5])
    assert event["location"] == f"train.py:{CALL}"
    assert not any("learning rate" in line for line in event["fix"])
    assert outcome.events("nonfinite", rank=0) == []


@pytest.mark.parametrize(
    ("way", "tensor"),
    [
        ("ddp", "gradient of 2.weight"),
        pytest.param("fsdp", "gradients of 2", marks=pytest.mark.slow),
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


# What may be advanced for looking is spent before its last step.
LARGE = """
import math, os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, step = dist.get_rank(), 0
model = DDP(nn.Sequential(nn.Linear(16, 2048), nn.Linear(2048, 2048)))


def spoil(gradient):
    gradient = gradient.clone()
    if (rank, step) == (1, 59):
        gradient[-1, -1] = math.nan
    return gradient


model.module[1].weight.register_hook(spoil)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(60):
    model(torch.ones(1, 16)).square().mean().backward()  # HERE
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_full_look_never_waits_for_its_share_of_the_time(run: Runner) -> None:
    outcome = run(LARGE, world=2, env={"MODEL_CHECK_GUARD": "full"})
    assert outcome.codes == [0, 0], outcome.errors
    (event,) = outcome.events("nonfinite", rank=1)
    assert (event["step"], event["cause"], event["tensor"]) == (59, "MC402", "gradient of 1.weight")
    (finding,) = examine(outcome.run_dir, live=False).findings
    assert (finding.code, finding.ranks, finding.step) == ("MC402", [1], 59)


@pytest.mark.slow
def test_gradients_that_the_script_mends_are_its_own_business(run: Runner) -> None:
    outcome = run_way(run, "mended")
    assert outcome.codes == [0, 0], outcome.errors
    assert [outcome.events("nonfinite", rank) for rank in (0, 1)] == [[], []]


# A norm over all ranks exchanges in both passes: a bad number comes back to everybody, and a forward that one rank runs
# by itself would find nobody there. Other ways to train meet their peers at other places, or not at all.
MIXED = """
import math, os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

way, kind = os.environ["WAY"], os.environ["KIND"]
dist.init_process_group("gloo")
rank, world, step = dist.get_rank(), dist.get_world_size(), 0


def spoil(numbers, now):
    numbers = numbers.clone()
    if kind == now and step == 3 and rank == 1:
        numbers.view(-1)[5] = math.nan
    return numbers


class Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, numbers, name):
        ctx.name = name
        return spoil(numbers, f"forward of {name}")

    @staticmethod
    def backward(ctx, gradient):
        return spoil(gradient, f"backward of {ctx.name}"), None


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.sum(0)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.expand(8, -1)


class Centred(nn.Linear):
    def forward(self, x):
        x = Spoilt.apply(nn.functional.linear(x, Spoilt.apply(self.weight, "weight"), self.bias), "activation")
        if way in ("fsdp", "metric"):
            dist.all_reduce(torch.tensor([math.nan if rank == 0 else -math.inf]))  # of nothing, and of a mask
        return x - Total.apply(x) / (8 * world) if way == "norm" else x


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), Centred(16, 16), nn.Tanh(), Centred(16, 16), nn.Linear(16, 1))
if way == "fsdp":
    from torch.distributed.fsdp import fully_shard
    fully_shard(model[1])
    fully_shard(model)
elif way == "views":
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    model[1] = FSDP(model[1], device_id=torch.device("cpu"), use_orig_params=True)
    model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
elif way == "hooks":
    for p in model.parameters():
        p.register_hook(lambda g: (dist.all_reduce(g := g / world), g)[1])
elif way not in ("alone", "gathered"):
    model = DDP(model)
if way == "hooked":
    def gathers(state, bucket):
        everybody = [torch.empty_like(bucket.buffer()) for _ in range(world)]
        future = dist.all_gather(everybody, bucket.buffer(), async_op=True).get_future()
        return future.then(lambda _: torch.stack(everybody).mean(0))
    model.register_comm_hook(None, gathers)
kind_of_optimizer = torch.optim.LBFGS if way == "closure" else torch.optim.SGD
optimizer = kind_of_optimizer(model.parameters(), lr=1e-3)


def compute():
    optimizer.zero_grad()
    for _ in range(2 if way == "twice" else 1):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
    return loss


for step in range(5):
    if way == "closure":
        optimizer.step(compute)
        continue
    compute()
    if way == "gathered":
        for p in model.parameters():
            all_of_them = [torch.empty_like(p.grad) for _ in range(world)]
            dist.all_gather(all_of_them, p.grad)
            p.grad = torch.stack(all_of_them).mean(0)
    if way != "fsdp" or torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()):
        optimizer.step()
    if way == "alone":
        for p in model.parameters():
            dist.all_reduce(p.data)
held = [getattr(p.detach(), "_local_tensor", p.detach()) for p in model.parameters()]
print("finite", all(bool(part.isfinite().all()) for part in held))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "kind", "tensor"),
    [
        ("norm", "backward of activation", "gradient of 3.bias"),
        ("norm", "backward of weight", "gradient of 3.weight"),
        ("hooks", "backward of weight", "gradients of reduction 4, counted from the loss,"),
        ("metric", "backward of weight", "gradient of 3.weight"),
        ("twice", "backward of weight", "gradient of 3.weight"),
        ("closure", "backward of weight", "gradient of 3.weight"),
        ("views", "backward of weight", "gradients of 1"),
        ("alone", "backward of weight", "gradient of 3.weight"),
        ("gathered", "backward of weight", "gradient of 3.weight"),
        ("hooked", "backward of weight", "gradient of 3.weight"),
    ],
)
def test_one_rank_is_named_however_its_number_comes_back_to_the_others(
    run: Runner, way: str, kind: str, tensor: str
) -> None:
    outcome = run(MIXED, world=2, env={"MODEL_CHECK_GUARD": "observe", "WAY": way, "KIND": kind}, timeout=60)
    assert outcome.codes == [0, 0], outcome.errors
    assert [outcome.events("guard_failed", rank) for rank in (0, 1)] == [[], []]
    (finding,) = examine(outcome.run_dir, live=False).findings
    assert (finding.code, finding.ranks, finding.victims, finding.step) == ("MC402", [1], [0], 3)
    assert finding.tensor == tensor


@pytest.mark.slow
def test_a_loss_that_a_peers_activations_spoilt_is_the_peers(run: Runner) -> None:
    env = {"MODEL_CHECK_GUARD": "observe", "WAY": "norm", "KIND": "forward of activation"}
    outcome = run(MIXED, world=2, env=env, timeout=60)
    assert outcome.codes == [0, 0], outcome.errors
    (finding,) = examine(outcome.run_dir, live=False).findings
    assert (finding.code, finding.ranks, finding.victims, finding.step) == ("MC401", [1], [0], 3)
    assert "observed: exchange 1 of the step was the first that it brought a NaN to" in finding.evidence


@pytest.mark.slow
def test_a_step_that_a_sharded_script_throws_away_spoils_nothing(run: Runner) -> None:
    env = {"MODEL_CHECK_GUARD": "observe", "WAY": "fsdp", "KIND": "backward of weight"}
    outcome = run(MIXED, world=2, env=env, timeout=60)
    assert outcome.codes == [0, 0], outcome.errors
    assert all("finite True" in said for said in outcome.outputs)
    assert examine(outcome.run_dir, live=False).findings == []


@pytest.mark.usefixtures("lone_group")
def test_what_a_rank_runs_by_itself_calls_nobody_and_other_threads_go_on() -> None:
    numbers, elsewhere = torch.ones(3, requires_grad=True), torch.ones(3)
    numbers.register_hook(lambda gradient: dist.all_reduce(gradient))
    with native_collectives.by_itself() as lone:
        thread = threading.Thread(target=dist.all_reduce, args=(elsewhere,))
        thread.start()
        thread.join()
        assert not lone.stopped
        with pytest.raises(native_collectives.NeedsPeers, match="no rank takes part"):
            torch.autograd.grad(numbers.sum(), numbers)
        assert lone.stopped
    assert dist.all_reduce(elsewhere) is None


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("in_hook", [True, False])
def test_what_is_gathered_counts_as_gradients_in_a_communication_hook_only(in_hook: bool) -> None:
    own = OwnGradients(in_turns=())
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)))
    own.learn_names(model)

    def gather() -> None:
        group: Any = dist.group.WORLD
        own.exchange_in_backward(native_collectives.Exchange([], group.boxed(), overlaps=False), [model])

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        if in_hook:
            gather()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    model(torch.ones(1, 3)).sum().backward()
    if not in_hook:  # as FSDP does: what it gathers in a backward are parameters
        gather()
    own.backward_ended()
    looked = own.at_the_optimizer([])
    if not in_hook:
        assert looked is None
        return
    assert looked is not None and looked.before_exchange
    assert (looked.numbers, looked.bad()) == (3 * 2 + 2 + 2 + 1, "")
    ((pieces, _),) = looked.parts
    assert [piece.name for piece in pieces] == ["gradients of 1.bias to 0.weight"]


SPARSE = """
import math
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Embedding(64, 8, sparse=True), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(5):
    loss = model(torch.arange(4) + step).mean()
    if step == 3 and rank == 1:
        loss = loss * math.nan
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_sparse_gradients_are_recorded_and_do_not_end_the_watching(run: Runner) -> None:
    outcome = run(SPARSE, world=2, env={"MODEL_CHECK_GUARD": "observe"})
    assert outcome.codes == [0, 0], outcome.errors
    assert outcome.crumbs(1)[-1].step == 5
    (event,) = outcome.events("nonfinite", rank=1)
    assert (event["step"], event["cause"]) == (3, "MC401")


@pytest.mark.usefixtures("lone_group")
def test_gradients_that_are_not_there_are_asked_for_once_in_a_pass() -> None:
    """A loop of small exchanges after a backward, of metrics, must not go through all parameters again and again."""
    own, model, asked = OwnGradients(in_turns=()), torch.nn.Linear(3, 2), []

    def parameters() -> list[Any]:
        asked.append(1)
        return list(model.parameters())

    for _ in range(2):
        own.backward_begins(model.parameters())
        own.backward_ended()
        for _ in range(3):
            own.exchange_after_backward(parameters)
    assert len(asked) == 2
    own.backward_begins(model.parameters())
    model(torch.full((1, 3), torch.nan)).sum().backward()
    own.exchange_after_backward(parameters)
    looked = own.at_the_optimizer(list(model.parameters()))
    assert looked is not None and looked.before_exchange is False and looked.bad() != ""
