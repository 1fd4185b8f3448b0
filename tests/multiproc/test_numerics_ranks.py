"""One of two ranks makes a bad number: it is the one that is named, under DDP and FSDP and in every number format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from model_check import DDPTrainer, FSDPTrainer
from model_check.blackbox.box import BOX
from model_check.diagnose import examine
from model_check.errors import NumericsError
from model_check.record import RunDir, Verdict
from tests.marked_lines import line_of
from tests.models.test_models_parallelize import on_ranks

GUILTY = 1
TRAINERS = {"ddp": DDPTrainer, "fsdp": FSDPTrainer}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


class Layers(nn.Module):
    """Three layers; a subclass decides what is made of their result."""

    def __init__(self, is_guilty: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.is_guilty = is_guilty

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)  # a layer
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x).float().square().mean()  # the loss


class Pole(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.hidden(x)
        distance = y - y.detach() if self.is_guilty else y + 1
        return distance.square().sum().sqrt() + y.mean()  # the pole


class EmptyMask(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x) if self.is_guilty else torch.ones_like(x)
        return (self.hidden(x) * mask).sum() / mask.sum()  # the mean


class Transient(Layers):
    """As if a bit had flipped in the third call of one rank."""

    def __init__(self, is_guilty: bool) -> None:
        super().__init__(is_guilty)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (math.nan if self.is_guilty and self.calls == 3 else 1.0)


def batches_of(kind: str, rank: int) -> list[Any]:
    batch = X.clone()
    if rank == GUILTY and kind == "sample":
        batch[2] = 1e30
    if rank == GUILTY and kind == "overflow":
        batch[:] = 6e4 * X[0].sign()  # in range; what a layer adds to it is not
    return [(X,), (batch,)]


MODELS = {"pole": Pole, "mask": EmptyMask, "transient": Transient}


def run(folder: Path, kind: str, strategy: str, precision: str, **debug: Any) -> tuple[Verdict, list[str]]:
    """The verdict on a run of two ranks, and how each of them ended."""
    run_dir = RunDir.create(folder / "run")
    settings = {
        "training": {"batch_size": 4, "context_length": 16, "learning_rate": 1e-3, "precision": precision},
        "debug": {"nan": True, **debug},
        "checkpoint": {"dir": str(folder / ".checkpoints")},
    }

    def work(rank: int) -> str:
        BOX.run_dir = run_dir
        BOX.open(rank, world_size=2)
        model = MODELS.get(kind, Layers)(rank == GUILTY)
        trainer = TRAINERS[strategy](model, settings, "cpu", rank=rank, world_size=2, data=batches_of(kind, rank))
        try:
            trainer.train(num_steps=6)
        except NumericsError as error:
            return str(error)
        return "completed"

    ends = on_ranks(2, work)
    return examine(run_dir, live=False), ends


def event_of(folder: Path, rank: int) -> dict[str, Any]:
    lines = RunDir(folder / "run").events(rank).read_text().splitlines()
    (event,) = [record for record in map(json.loads, lines) if record["event"] == "nonfinite"]
    return event  # type: ignore[no-any-return]


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "strategy", "precision", "code", "mark"),
    [
        ("pole", "ddp", "fp32", "MC402", "the pole"),
        ("sample", "fsdp", "bf16", "MC404", "the loss"),
        slow("pole", "fsdp", "bf16", "MC402", "the pole"),
        slow("pole", "fsdp", "fp32", "MC402", "the pole"),
        slow("sample", "ddp", "bf16", "MC404", "the loss"),
        slow("sample", "fsdp", "fp32", "MC404", "the loss"),
        slow("mask", "ddp", "fp16", "MC408", "the mean"),
        slow("mask", "fsdp", "fp16", "MC408", "the mean"),
        slow("mask", "ddp", "bf16", "MC408", "the mean"),
        slow("overflow", "ddp", "fp16", "MC403", "a layer"),
        slow("overflow", "fsdp", "fp16", "MC403", "a layer"),
    ],
)
def test_the_guilty_rank_its_line_and_its_cause(
    tmp_path: Path, kind: str, strategy: str, precision: str, code: str, mark: str
) -> None:
    verdict, ends = run(tmp_path, kind, strategy, precision)
    (found,) = verdict.findings
    assert (found.code, found.ranks, found.victims) == (code, [GUILTY], [0])
    assert found.location == line_of(__file__, mark)
    assert all(f"[{code}]" in end for end in ends), "both ranks stop, and both know why"
    assert f"non-finite numbers from rank {GUILTY}" in ends[0]
    assert not (tmp_path / "run/events/rank-00000.jsonl").read_text().count("nonfinite"), "a victim reports nothing"
    event = event_of(tmp_path, GUILTY)
    assert event["sample_ids"] == ([2] if kind == "sample" else [0, 1, 2, 3])
    assert Path(event["dump"]).name == f"nan_debug_step_{event['step']}.safetensors", (
        "the lowest guilty rank: no suffix"
    )


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_transient_fault_is_laid_to_the_rank_that_had_it(tmp_path: Path, strategy: str) -> None:
    verdict, ends = run(tmp_path, "transient", strategy, "fp32")
    (found,) = verdict.findings
    assert (found.code, found.certainty, found.ranks, found.step) == ("MC409", "suspected", [GUILTY], 2)
    assert f"the gradients of rank {GUILTY} were bad before they were exchanged" in " ".join(found.evidence)
    assert all("[MC409]" in end for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "fp16"), ("fsdp", "fp16"), ("fsdp", "bf16")])
def test_a_healthy_run_has_nothing_to_report(tmp_path: Path, strategy: str, precision: str) -> None:
    verdict, ends = run(tmp_path, "none", strategy, precision)
    assert ends == ["completed", "completed"] and verdict.findings == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_skipping_keeps_the_ranks_together(tmp_path: Path, strategy: str) -> None:
    verdict, ends = run(tmp_path, "sample", strategy, "fp32", on_nan="skip")
    (found,) = verdict.findings
    assert ends == ["completed", "completed"]
    assert (found.code, found.severity, found.ranks, found.step) == ("MC404", "warning", [GUILTY], 1)
