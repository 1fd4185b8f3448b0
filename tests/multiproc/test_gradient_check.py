"""One rank computes wrong gradients: it is named, and the check itself changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from model_check import DDPTrainer, FSDPTrainer
from model_check.blackbox.box import BOX
from model_check.diagnose import examine
from model_check.errors import UsageError
from model_check.record import Finding, RunDir
from tests.models.test_models_parallelize import on_ranks

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


class Broken(torch.autograd.Function):
    """As a device that multiplies wrongly on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class Net(nn.Module):
    """Dropout on purpose: the check must give all ranks the same random numbers, and training its own back."""

    def __init__(self, wrong_calls: range) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 1)
        self.register_buffer("calls_seen", torch.zeros(()))
        self._wrong_calls = wrong_calls
        self._calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wrong = self._calls in self._wrong_calls
        self._calls += 1
        self.calls_seen += 1
        hidden: torch.Tensor = Broken.apply(self.first(x), 1.3 if wrong else 1.0)
        return self.last(self.drop(hidden)).square().mean()  # type: ignore[no-any-return]


def train(folder: Path, world: int, wrong_calls: dict[int, range], every: int = 2) -> tuple[list[Finding], list[Any]]:
    """What is found, and each rank's losses and count of calls."""
    run_dir = RunDir.create(folder)
    settings = {
        "training": {"batch_size": 4, "context_length": 16, "learning_rate": 1e-2, "precision": "fp32"},
        "debug": {"verify_gradients": every},
    }

    def work(rank: int) -> Any:
        BOX.run_dir = run_dir
        BOX.open(rank, world_size=world)
        model = Net(wrong_calls.get(rank, range(0)))
        trainer = DDPTrainer(model, settings, "cpu", rank=rank, world_size=world, data=[(X + rank,)])
        return trainer.train(num_steps=4).losses, float(model.calls_seen)

    ends = on_ranks(world, work)
    return [f for f in examine(run_dir, live=False).findings if f.code == "MC411"], ends


def test_of_three_ranks_the_odd_one_is_named(tmp_path: Path) -> None:
    (found,), _ = train(tmp_path, 3, {1: range(100)})
    assert (found.ranks, found.victims, found.step, found.tensor) == ([1], [0, 2], 1, "first.bias")
    assert found.title == "rank 1 computes wrong gradients for first.bias"
    assert "observed: rank 1 computes on CPU1" in found.evidence


def test_of_two_ranks_the_one_that_contradicts_itself_is_named(tmp_path: Path) -> None:
    # Calls 0 and 1 are steps, call 2 the check, call 3 its repetition.
    (found,), _ = train(tmp_path, 2, {1: range(2, 3)})
    assert (found.ranks, found.victims) == ([1], [0])


def test_two_ranks_that_both_insist_are_both_named(tmp_path: Path) -> None:
    (found,), _ = train(tmp_path, 2, {1: range(100)})
    assert found.ranks == [0, 1]
    assert found.title == "ranks 0 and 1 compute different gradients for first.bias"
    assert found.evidence[-1] == "inferred: no majority agrees, so nobody can say which of them is right"


def test_a_healthy_job_is_left_as_it_was(tmp_path: Path) -> None:
    checked, with_check = train(tmp_path / "with", 2, {})
    _, without = train(tmp_path / "without", 2, {}, every=0)
    assert checked == [] and with_check == without


def refused(trainer: type[DDPTrainer], rank: int, world: int) -> str:
    settings = {"debug": {"verify_gradients": 5}, "training": {"precision": "fp32"}}
    with pytest.raises(UsageError) as error:
        trainer(Net(range(0)), settings, "cpu", rank=rank, world_size=world, data=[(X,)]).train(num_steps=1)
    return str(error.value)


def test_where_there_are_no_replicas_it_says_so() -> None:
    assert "verify_gradients=5 compares replicas, and one rank has no peer" in refused(DDPTrainer, 0, 1)
    for said in on_ranks(2, lambda rank: refused(FSDPTrainer, rank, 2)):
        assert "the model is not whole on each rank" in said
