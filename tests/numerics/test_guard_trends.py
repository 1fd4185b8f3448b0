"""What a script's process writes down of its losses, gradients and outputs, and the warnings that are made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model_check.blackbox.box import BOX, RANK_PID_VARIABLE
from model_check.blackbox.device_numbers import reading_of
from model_check.diagnose import examine
from model_check.numerics.trends import Trends
from model_check.record import Finding, RunDir, read_jsonl


class Net(torch.nn.Module):
    """A factor that the test sets makes the outputs and the gradients of the head as large as it likes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Linear(4, 4)
        self.unused = torch.nn.Linear(4, 4, bias=False)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.frozen.requires_grad_(False)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(x)) * self.factor


class Script:
    """Takes steps as a script would, with the trends told what the hooks would tell them."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = BOX.run_dir = RunDir.create(folder)
        BOX.open(0, world_size=1)
        self.model: Net | Dead = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.trends = Trends()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.largest: list[float] = []

    def step(self, x: torch.Tensor) -> None:
        out = self.model(x)
        self.trends.forward_ended(self.model, out)
        loss = out.abs().mean()
        self.trends.backward_begins(reading_of(loss))
        loss.backward()
        self.trends.optimizer_begins(self.optimizer)
        assert self.model.head.weight.grad is not None and BOX.recorder is not None
        self.losses.append(loss.item())
        self.norms.append(float(self.model.head.weight.grad.norm()))
        self.largest.append(out.abs().max().item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        BOX.step_done(BOX.recorder)
        self.trends.step_done()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in read_jsonl(self.run_dir.events(0)).records if e["event"] == name]

    def findings(self) -> list[Finding]:
        return examine(self.run_dir, live=False).findings


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setenv(RANK_PID_VARIABLE, "0")
    before = BOX.run_dir
    yield Script(tmp_path / "run")
    BOX.leave()
    BOX.run_dir = before


def six_digits(values: list[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def run(script: Script, steps: int, factor_at: Callable[[int], float] = lambda step: 1.0) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        script.model.factor = factor_at(step)
        script.step(torch.randn(8, 4, generator=generator))
    script.trends.flush()


def test_every_loss_is_written_once_with_its_step(script: Script) -> None:
    run(script, 120)
    written = script.events("losses")
    assert [step for record in written for step in record["steps"]] == list(range(120))
    assert [value for record in written for value in record["values"]] == six_digits(script.losses)


def test_a_look_has_the_norms_the_outputs_the_rate_and_what_cannot_learn(script: Script) -> None:
    run(script, 120)
    looks = script.events("gradients")
    assert [look["step"] for look in looks] == [50, 100]
    assert [look["norms"] for look in looks] == [
        {"head.weight": norm} for norm in six_digits([script.norms[50], script.norms[100]])
    ]
    assert [look["largest_output"] for look in looks] == six_digits([script.largest[50], script.largest[100]])
    for look in looks:
        assert (look["lr"], look["choices"], look["parameters"]) == ([1e-6], 5, 4)
        assert look["frozen"] == ["frozen.weight", "frozen.bias"]
        assert look["without_gradient"] == ["unused.weight"]


class Dead(torch.nn.Module):
    """The ReLU behind `middle` never lets anything through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = (torch.nn.Linear(4, 4) for _ in range(3))
        torch.nn.init.constant_(self.middle.bias, -100.0)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.middle(torch.tanh(self.first(x)))))


def test_the_dead_layer_is_found_in_the_order_of_the_model_whatever_that_of_the_optimizer(script: Script) -> None:
    script.model = model = Dead()
    vectors_first = sorted(model.parameters(), key=lambda parameter: parameter.dim())
    script.optimizer = torch.optim.SGD([{"params": vectors_first[:3]}, {"params": vectors_first[3:]}], lr=1e-6)
    run(script, 201)
    looks = script.events("gradients")
    assert [list(look["norms"]) for look in looks] == [[name for name, _ in model.named_parameters()]] * 4
    (found,) = script.findings()
    assert (found.code, found.tensor, found.step) == ("MC415", "middle.weight", 200)
    assert found.evidence[1:] == [
        "observed: so is that of first.weight, first.bias, middle.bias, in this layer or before it",
        "observed: so is that of head.weight behind it",
        "inferred: the gradient stops between this layer and head.bias, the next that has one",
    ]


def test_the_look_of_the_very_last_step_is_not_lost(script: Script) -> None:
    run(script, 51)
    assert [look["step"] for look in script.events("gradients")] == [50]


@pytest.mark.parametrize(
    ("growth", "what", "tensor"),
    [
        (2.2, "largest output of the model", None),  # 23 times in all: no gradient is called growing for that
        (4.0, "gradient norm", "head.weight"),
    ],
)
def test_what_grows_with_the_steps_ends_in_a_warning(
    script: Script, growth: float, what: str, tensor: str | None
) -> None:
    run(script, 251, lambda step: 20 * growth ** (step / 50))
    (found,) = script.findings()
    assert (found.code, found.ranks, found.severity, found.step) == ("MC416", [0], "warning", 250)
    assert found.title.startswith(f"the {what} keeps growing") and found.tensor == tensor
    assert found.evidence[0].endswith("at steps 50, 100, 150, 200, 250")


def test_numbers_that_stay_where_they_are_say_nothing(script: Script) -> None:
    run(script, 251)
    assert script.findings() == []
