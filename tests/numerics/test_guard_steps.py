"""The numerics guard of a foreign script: what it names, what it leaves alone, and what it must never change."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_check.blackbox.box import BOX, GUARD_VARIABLE, RANK_PID_VARIABLE
from model_check.blackbox.device_numbers import reading_of
from model_check.errors import NumericsError
from model_check.numerics.probes import size_of
from model_check.numerics.replicas import _Copies, bit_sum
from model_check.numerics.script_guard import Guard
from model_check.record import RunDir, read_jsonl
from tests.blackbox.observed_runs import Runner

Loss = Callable[[torch.Tensor], torch.Tensor]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.2)
        self.down = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.relu(self.norm(self.up(x)))))


class Distance(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gap = self.embed(x) - self.embed(x.flip(0))
        return gap.square().sum(dim=1).sqrt()  # ROOT


class Branches(torch.nn.Module):
    """The branch with the pole holds the second of its parameters, the other one the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.nn.Linear(6, 1, bias=False)
        self.rooted = torch.nn.Linear(6, 1, bias=False)
        self.tail = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) + self.tail(x) + self.rooted(x).square().sqrt()


class Flaky(torch.nn.Module):
    """Bad once, and fine when asked again."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 3)
        self.bad_calls = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bad_calls -= 1
        return self.body(x) * (math.inf if self.bad_calls == 0 else 1.0)


class Script:
    """Takes training steps as a script would, with the guard told what the hooks would tell it."""

    def __init__(self, folder: Path, model: torch.nn.Module) -> None:
        torch.manual_seed(0)
        BOX.run_dir = RunDir.create(folder)
        BOX.open(0, world_size=1)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.guard = Guard()

    def step(
        self,
        x: torch.Tensor,
        loss_of: Loss,
        *,
        apply: bool = True,
        clip: float | None = None,
        norm: torch.Tensor | None = None,
    ) -> None:
        call = self.guard.forward_begins(self.model, (x,), {})
        out = self.model(x)
        if call is not None:
            self.guard.forward_ended(call, out)
        loss = loss_of(out)
        self.guard.backward_begins(loss, reading_of(loss))
        loss.backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        if norm is not None:
            self.guard.norm_taken(norm)
        if apply:
            self.guard.optimizer_begins(self.optimizer)
            self.optimizer.step()
            assert BOX.recorder is not None
            BOX.step_done(BOX.recorder)
            self.guard.step_done()
        self.optimizer.zero_grad()

    def events(self, name: str) -> list[dict[str, Any]]:
        assert BOX.run_dir is not None
        return [e for e in read_jsonl(BOX.run_dir.events(0)).records if e["event"] == name]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Script]]:
    monkeypatch.setenv(RANK_PID_VARIABLE, "0")
    before = BOX.run_dir

    def make(model: torch.nn.Module, mode: str = "observe") -> Script:
        monkeypatch.setenv(GUARD_VARIABLE, mode)
        return Script(tmp_path / "run", model)

    yield make
    BOX.leave()
    BOX.run_dir = before


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


def mean_square(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def test_a_bad_sample_is_named_with_its_place_in_the_batch(watched: Callable[..., Script]) -> None:
    run = watched(Distance())
    for _ in range(3):
        run.step(torch.randn(6, 6), mean_square)
    x = torch.randn(6, 6)
    x[4, 2] = math.inf
    run.step(x, mean_square)
    (event,) = run.events("nonfinite")
    assert (event["cause"], event["step"], event["sample_ids"]) == ("MC404", 3, [4])
    assert (event["tensor"], event["direction"], event["action"]) == ("input 0", "forward", "observe")


def test_a_root_at_zero_is_found_by_its_slope(watched: Callable[..., Script]) -> None:
    run = watched(Distance())
    run.step(torch.randn(4, 6), mean_square)
    x = torch.randn(4, 6)
    x[3] = x[0]
    run.step(x, lambda out: out.mean())
    (event,) = run.events("nonfinite")
    assert (event["cause"], event["direction"], event["op"]) == ("MC402", "backward", "sqrt")
    assert event["location"] == f"{__file__}:{line_of('ROOT')}" and event["function"] == "forward"


def test_a_mean_over_nothing_is_named_by_its_line_outside_the_model(watched: Callable[..., Script]) -> None:
    run = watched(Net())
    mask = torch.zeros(4, 3)
    for scale in (1.0, 0.0):
        weights = mask + scale
        call = run.guard.forward_begins(run.model, (torch.randn(4, 6),), {})
        assert call is not None
        out = run.model(call.args[0])
        run.guard.forward_ended(call, out)
        total = (out.square() * weights).sum()
        loss = total / weights.sum()  # EMPTY
        run.guard.backward_begins(loss, reading_of(loss))
        loss.backward()
        run.guard.optimizer_begins(run.optimizer)
        run.guard.step_done()
    (event,) = run.events("nonfinite")
    assert (event["cause"], event["op"], event["made_in"]) == ("MC408", "div", "loss_code")
    assert event["location"] == f"{__file__}:{line_of('EMPTY')}"
    assert "observed: what the model returned is finite" in event["evidence"]


def test_an_output_that_is_bad_once_is_called_transient(watched: Callable[..., Script]) -> None:
    run = watched(Flaky())
    run.step(torch.randn(4, 6), mean_square)
    (event,) = run.events("nonfinite")
    assert (event["cause"], event["deterministic"]) == ("MC409", False)


def test_inputs_that_were_overwritten_are_not_replayed_and_it_says_so(watched: Callable[..., Script]) -> None:
    run = watched(Net())
    x = torch.randn(4, 6)
    call = run.guard.forward_begins(run.model, (x,), {})
    assert call is not None and call.why_not_again() == ""
    x.zero_()
    assert call.why_not_again() == "the script has changed its forward's inputs in place"


def test_a_tensor_of_a_graph_is_not_kept_alive(watched: Callable[..., Script]) -> None:
    """The logits that a loss module is given are freed in the backward, as they are without us."""
    run = watched(Net())
    logits = run.model(torch.randn(4, 6))
    call = run.guard.forward_begins(torch.nn.Identity(), (logits,), {})
    run.guard.forward_ended(call, None)
    assert call is not None and call.why_not_again() == ""
    del logits
    assert call.why_not_again() == "what its forward was given is no longer there"


def test_a_forward_that_failed_keeps_nothing_alive(watched: Callable[..., Script]) -> None:
    """A script that has run out of memory goes on with a smaller batch: the graph must not wait for us."""
    run = watched(Net())
    logits = run.model(torch.randn(4, 6))
    known = weakref.ref(logits)
    run.guard.forward_begins(torch.nn.Identity(), (logits,), {})
    run.guard.forward_failed()
    del logits
    assert known() is None


def test_the_inputs_of_a_step_are_let_go_before_the_next_forward(watched: Callable[..., Script]) -> None:
    """Two batches at once would be memory that the script does not take without us."""
    run = watched(Net())
    x = torch.randn(4, 6)
    known = weakref.ref(x)
    run.step(x, mean_square)
    del x
    assert known() is not None
    run.guard.forward_begins(run.model, (torch.randn(4, 6),), {})
    assert known() is None


def test_a_step_that_the_script_leaves_out_is_its_own_business(watched: Callable[..., Script]) -> None:
    run = watched(Distance())
    x = torch.randn(4, 6)
    x[0, 0] = math.nan
    run.step(x, mean_square, apply=False)
    run.step(torch.randn(4, 6), mean_square)
    assert run.events("nonfinite") == []


def test_halt_refuses_the_step_and_every_later_one(watched: Callable[..., Script]) -> None:
    run = watched(Distance(), mode="halt")
    run.step(torch.randn(4, 6), mean_square)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    x = torch.randn(4, 6)
    x[0, 0] = math.nan
    with pytest.raises(NumericsError, match="step 1 is not applied"):
        run.step(x, mean_square)
    with pytest.raises(NumericsError, match="--guard halt"):
        run.step(torch.randn(4, 6), mean_square)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert [event["action"] for event in run.events("nonfinite")] == ["halt"]


def test_halt_looks_at_every_gradient_of_every_step(watched: Callable[..., Script]) -> None:
    run = watched(Branches(), mode="halt")
    run.step(torch.randn(4, 6), mean_square)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    x = torch.randn(4, 6)
    x[2] = 0.0
    with pytest.raises(NumericsError, match="step 1 is not applied"):
        run.step(x, mean_square)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    (event,) = run.events("nonfinite")
    assert (event["cause"], event["op"], event["step"]) == ("MC402", "sqrt", 1)


class _Lone(torch.autograd.Function):
    """A number among the gradients of one weight that goes nowhere else."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, made: float) -> torch.Tensor:
        ctx.made = made
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        gradient[-1, -1] = ctx.made
        return gradient, None


class Alone(torch.nn.Module):
    """Of its second parameter only a part is looked at in most steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 512)
        self.weight = torch.nn.Parameter(torch.randn(512, 512) / 32)
        self.made = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) @ _Lone.apply(self.weight, self.made)


@pytest.mark.parametrize(
    ("made", "clips", "mode", "told"),
    [
        (math.inf, True, "observe", True),
        (math.nan, True, "observe", True),
        (0.0, True, "observe", False),
        (math.inf, False, "observe", False),
        (math.inf, False, "full", True),
        (math.nan, False, "full", True),
        (0.0, False, "full", False),
    ],
)
def test_what_is_not_read_in_a_step_is_seen_by_the_norm_that_a_script_clips_by_and_by_a_full_look(
    watched: Callable[..., Script], made: float, clips: bool, mode: str, told: bool
) -> None:
    """Both read every gradient; without them this one is missed."""
    model = Alone()
    run = watched(model, mode)

    if mode == "observe":
        run.guard._own.in_turns = ("cpu",)  # the fifth step reads another part than the one with the last number
    for number in range(5):
        model.made = made if number == 4 else 0.0
        run.step(torch.randn(4, 6), mean_square, clip=1.0 if clips else None)
    events = run.events("nonfinite")
    assert [(event["step"], event["cause"], event["direction"]) for event in events] == [
        (4, "MC402", "backward")
    ] * told
    if told and clips:
        assert str(float(events[0]["grad_norm"])) == str(made)
    if mode == "full" and told:
        assert (events[0]["tensor"], events[0]["action"]) == ("gradient of weight", "observe")


@pytest.mark.parametrize(("mode", "in_turns"), [("observe", ("cuda",)), ("full", ()), ("halt", ())])
def test_only_the_default_lets_the_gradients_of_a_gpu_take_turns(
    watched: Callable[..., Script], mode: str, in_turns: tuple[str, ...]
) -> None:
    assert watched(Alone(), mode).guard._own.in_turns == in_turns


@pytest.mark.parametrize(
    ("mode", "in_turns", "why"),
    [
        (
            "observe",
            ("cpu",),
            "the update of the step before made it so, by a gradient that was not looked at or by itself",
        ),
        ("observe", (), "all gradients of the step before were finite: its update made it so, or the script"),
        ("halt", (), "all gradients of the step before were finite: its update made it so, or the script"),
    ],
)
def test_a_weight_that_the_script_spoils_is_laid_to_what_happened_between_the_steps(
    watched: Callable[..., Script], mode: str, in_turns: tuple[str, ...], why: str
) -> None:
    run = watched(Alone(), mode)
    run.guard._own.in_turns = in_turns
    run.step(torch.randn(4, 6), mean_square)
    with torch.no_grad():
        run.model.get_parameter("first.weight")[2, 1] = math.nan
    with pytest.raises(NumericsError) if mode == "halt" else contextlib.nullcontext():
        run.step(torch.randn(4, 6), mean_square)
    (event,) = run.events("nonfinite")
    assert (event["cause"], event["step"], event["tensor"]) == ("MC401", 1, "parameter first.weight")
    assert event["evidence"][-1] == f"inferred: {why}"
    assert ("--guard full" in event["fix"][0]) == bool(in_turns)


def test_a_norm_that_overflows_in_good_health_is_no_fault(watched: Callable[..., Script]) -> None:
    run = watched(Net())
    for _ in range(3):
        run.step(torch.randn(4, 6), mean_square, norm=torch.tensor(math.inf))
    assert run.events("nonfinite") == []


def test_a_norm_of_other_gradients_is_not_shown_for_that_of_the_bad_ones(watched: Callable[..., Script]) -> None:
    run = watched(Distance())
    run.step(torch.ones(4, 6), lambda out: out.mean(), norm=torch.tensor(2.0))
    (event,) = run.events("nonfinite")
    assert (event["cause"], event["op"], str(event["grad_norm"])) == ("MC402", "sqrt", "nan")


def test_a_loss_code_that_was_handed_bad_numbers_is_not_blamed(watched: Callable[..., Script]) -> None:
    """The forward cannot be run again and its result is gone: the graph tells that the loss code only received it."""
    run = watched(Net())
    x = torch.randn(4, 6)
    x[1, 1] = math.nan
    call = run.guard.forward_begins(run.model, (x,), {})
    assert call is not None
    loss = torch.nn.functional.cross_entropy(run.model(x), torch.arange(4) % 3)
    run.guard.forward_ended(call, None)
    call.free()
    run.guard.backward_begins(loss, reading_of(loss))
    loss.backward()
    run.guard.optimizer_begins(run.optimizer)
    (event,) = run.events("nonfinite")
    assert (event["cause"], event["op"], event["module"]) == ("MC401", "addmm", "Net")
    given = "it is the first operation that is given a number that is not finite"
    assert event["evidence"] == [f"inferred: addmm in the forward of Net: {given}"]


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_the_replay_leaves_no_trace_in_the_script(watched: Callable[..., Script], mode: str) -> None:
    """Running statistics, random numbers and gradients are those of a run without a guard."""
    run = watched(Net(), mode=mode)
    reference = Net()
    reference.load_state_dict(run.model.state_dict())
    states = []
    for model, looked_at in ((run.model, True), (reference, False)):
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.model, run.optimizer = model, optimizer
        run.guard.reports.mode = mode if looked_at else "off"  # type: ignore[assignment]
        for number in range(6):
            x = torch.randn(4, 6)
            x[2, 2] = math.nan if number == 4 else 0.0
            run.step(x, mean_square)
        states.append((model.state_dict(), torch.get_rng_state()))
    assert len(run.events("nonfinite")) == (mode == "observe")
    (left, left_random), (right, right_random) = states
    assert torch.equal(left_random, right_random)
    assert all(torch.equal(torch.nan_to_num(left[name], 9.0), torch.nan_to_num(right[name], 9.0)) for name in left)


def test_a_weight_that_came_in_bad_is_not_laid_to_a_learning_rate(watched: Callable[..., Script]) -> None:
    script = watched(Distance())
    with torch.no_grad():
        script.model.embed.weight[1, 2] = math.inf  # type: ignore[union-attr, operator, index]
    script.step(torch.randn(4, 6), lambda out: out.mean())
    (event,) = script.events("nonfinite")
    assert (event["cause"], event["tensor"], event["ranges"]) == ("MC401", "parameter embed.weight", [])
    assert event["fix"] == ["look at how the named parameter is initialised, or at the file that it is loaded from"]


def test_what_a_hook_spoils_is_looked_for_in_the_hook(watched: Callable[..., Script]) -> None:
    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0] = math.inf
        return gradient

    model = torch.nn.Linear(6, 1)
    model.bias.register_hook(spoil)
    script = watched(model)
    script.step(torch.randn(4, 6), lambda out: out.square().mean())
    (event,) = script.events("nonfinite")
    assert event["cause"] == "MC402"
    assert event["fix"] == ["look at the hooks on the named parameter, and at the backward of every autograd.Function"]
    assert event["grad_norm"] == "nan", "the weight's own, which was probed, is finite"


def test_the_norm_of_a_loss_that_spoils_nothing_is_that_of_all_gradients(watched: Callable[..., Script]) -> None:
    script = watched(torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 1)))
    x, taken = torch.randn(4, 6), []

    def no_pull(out: torch.Tensor) -> torch.Tensor:
        loss = out.square().mean()
        gradients = torch.autograd.grad(loss, list(script.model.parameters()), retain_graph=True)
        taken.append(float(torch.nn.utils.get_total_norm(gradients)))
        return loss + math.inf

    script.step(x, no_pull)
    script.guard.reports.flush()
    (event,) = script.events("nonfinite")
    assert event["spoils"] is False
    assert event["grad_norm"] == pytest.approx(taken[0], rel=1e-5)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out: (out.abs() ** torch.tensor([1.0, 2.0, 3.0])).mean(),
        lambda out: torch.pow(2.0, out).mean(),
        lambda out: (out.abs() ** 3).mean(),
    ],
    ids=["exponents", "base", "plain"],
)
def test_powers_in_the_loss_code_do_not_stop_the_guard(watched: Callable[..., Script], loss_of: Loss) -> None:
    script = watched(torch.nn.Linear(6, 3))
    script.step(torch.randn(4, 6), loss_of)
    script.step(torch.randn(4, 6), lambda out: loss_of(out) * math.nan)
    (event,) = script.events("nonfinite")
    assert (event["step"], event["cause"]) == (1, "MC401")


class Surprise(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(self.body(x), dim=-1) * 0).log()


@pytest.mark.parametrize(
    ("model", "loss_of"),
    [(Surprise(), torch.mean), (torch.nn.Linear(6, 3), lambda out: (out * 0).log().mean())],
    ids=["model", "loss code"],
)
def test_a_logarithm_of_zero_is_not_cured_by_a_learning_rate(
    watched: Callable[..., Script], model: torch.nn.Module, loss_of: Loss
) -> None:
    script = watched(model)
    script.step(torch.randn(4, 6), loss_of)
    (event,) = script.events("nonfinite")
    assert (event["cause"], event["op"]) == ("MC401", "log")
    assert event["fix"] == [
        "look at the named line and the numbers that go into it",
        "keep it away from 0: x.clamp(min=eps).log(), sqrt(x + eps), a / (b + eps)",
    ]


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Parameter(torch.zeros(4))

    def forward(self, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.scores + mask, dim=-1)


def test_minus_infinity_in_a_mask_makes_no_sample_a_bad_one(watched: Callable[..., Script]) -> None:
    mask = torch.zeros(6, 4)
    mask[:3, 2:] = -math.inf  # meant: these rows see their first two places
    mask[4] = -math.inf  # this one sees nothing
    script = watched(Attention())
    script.step(mask, lambda out: out.square().mean())
    (event,) = script.events("nonfinite")
    assert (event["cause"], event["op"], event["sample_ids"]) == ("MC408", "softmax", [4])


COLLAPSE = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(40):
    out = model(torch.randn(2, 4)).half()
    loss = (out * 60000 * 60000).float().mean() if step >= 20 else out.float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
"""


@pytest.mark.slow
def test_a_scaler_that_never_stops_skipping_is_an_overflow(run: Runner) -> None:
    outcome = run(COLLAPSE, env={"MODEL_CHECK_GUARD": "observe"})
    assert outcome.codes == [0], outcome.errors
    assert outcome.events("guard_failed") == []
    (event,) = outcome.events("nonfinite")
    assert event["cause"] == "MC403" and event["location"].startswith("train.py:")
    assert "steps in a row were left out" in " ".join(event["evidence"])


# Sums over bits


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool]),
    st.integers(1, 70),
    st.integers(0, 3),
    st.data(),
)
def test_one_changed_bit_changes_the_sum_whatever_the_type_and_place(
    dtype: torch.dtype, count: int, offset: int, data: st.DataObject
) -> None:
    held = torch.zeros(count + offset, dtype=dtype)
    tensor = held[offset:]
    before = int(bit_sum(tensor))
    at = data.draw(st.integers(0, count - 1))
    tensor[at] = 1
    assert int(bit_sum(tensor)) != before
    start, end = sorted((data.draw(st.integers(0, count)), data.draw(st.integers(0, count))))
    assert (int(bit_sum(tensor, start, end)) != 0) == (start <= at < end)


def test_every_parameter_has_its_turn() -> None:
    class Wrapped:
        module = torch.nn.Sequential(*[torch.nn.Linear(40, 40) for _ in range(30)])

    copies = _Copies.under_ddp(Wrapped())
    names = {piece.name for _ in range(4) for piece in copies.take_turn()}
    assert names == {name for name, _ in Wrapped.module.named_parameters()}


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3).to_sparse(),
        torch.zeros(0),
        torch.ones(3, dtype=torch.bfloat16),
    ],
    ids=["complex", "sparse", "empty", "half"],
)
def test_gradients_of_every_kind_are_looked_at_or_left_alone(gradient: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(torch.zeros_like(gradient.to_dense()))
    parameter.grad = gradient
    size = size_of(parameter)
    looked_at = gradient.numel() > 0
    assert (size is not None) == looked_at
    assert size is None or size.value() == pytest.approx(math.sqrt(3), rel=1e-2)
