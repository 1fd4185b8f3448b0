"""Training from Python: the calls that the earlier guides show, with any module that returns a loss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from model_check import DDPTrainer, SimpleModel, load_config
from model_check.engine.passes import loss_of
from model_check.errors import ModelError, NumericsError, UsageError

CONFIG = {
    "training": {
        "batch_size": 2,
        "context_length": 32,
        "max_steps": 5,
        "learning_rate": 1e-2,
        "precision": "fp32",
        "max_grad_norm": 1.0,
    },
    "data": {"samples": 300},
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer(**options: Any) -> DDPTrainer:
    torch.manual_seed(0)
    return DDPTrainer(SimpleModel(hidden_size=32, num_layers=2), CONFIG, "cpu", **options)


def test_the_minimal_reproduction_of_the_guides_runs() -> None:
    result = trainer(rank=0, world_size=1).train(num_steps=1, warmup_steps=0)
    assert len(result.steps) == 1
    assert 8.0 < result.losses[0] < 8.8, "ln(4096) is 8.3"


def test_training_learns_and_warmup_ramps_the_rate() -> None:
    result = trainer().train(num_steps=40, warmup_steps=4)
    assert result.losses[-1] < result.losses[0] - 1.0
    rates = [info.lr for info in result.steps[:6]]
    assert rates == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01, 0.01])


def test_accumulation_over_two_equals_one_batch_of_twice_the_size() -> None:
    accumulated = trainer(gradient_accumulation_steps=2).train(num_steps=4)
    torch.manual_seed(0)
    wide = {**CONFIG, "training": {**CONFIG["training"], "batch_size": 4}}
    whole = DDPTrainer(SimpleModel(32, 2), wide, "cpu").train(num_steps=4)
    assert accumulated.losses == pytest.approx(whole.losses, rel=1e-5)
    assert accumulated.steps[-1].tokens == whole.steps[-1].tokens


def test_checkpoints_are_saved_at_their_interval() -> None:
    trainer().train(num_steps=5, save_checkpoints=True, checkpoint_interval=2)
    lineages = [path for path in Path(".checkpoints").iterdir() if not path.is_symlink()]
    assert len(lineages) == 1
    saved = sorted(path.name for path in lineages[0].iterdir() if path.is_dir())
    assert saved == ["latest", "step_00000001", "step_00000003", "step_00000004"]
    assert (Path(".checkpoints") / "latest").resolve().name == "step_00000004"


def test_profile_leaves_a_trace_that_tensorboard_opens() -> None:
    result = trainer().train(num_steps=6, profile=True)
    assert result.trace_dir is not None
    traces = list(result.trace_dir.glob("*.pt.trace.json"))
    assert len(traces) == 1 and '"traceEvents"' in traces[0].read_text()


class Regression(nn.Module):
    """Somebody else's module: keywords in, an object with .loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=((self.layer(x) - y) ** 2).mean())


def test_any_module_and_any_batches() -> None:
    torch.manual_seed(1)
    x = torch.randn(16, 3)
    batches = [{"x": x, "y": x.sum(dim=1, keepdim=True)}]
    config = load_config(values={**{k: (v, "test") for k, v in CONFIG.items()}, "training.weight_decay": (0.0, "test")})
    result = DDPTrainer(Regression(), config, "cpu", data=batches).train(num_steps=200)
    assert result.losses[0] > 0.5
    assert result.final_loss is not None and result.final_loss < result.losses[0] / 20


def test_a_config_file_is_read_as_the_command_line_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"training": {"max_steps": 3, "batch_size": 1, "context_length": 32}} // a comment')
    assert DDPTrainer(SimpleModel(8, 1), file).config.training.max_steps == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
def test_a_gpu_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(UsageError, match="device='cuda', and torch sees no GPU here"):
        DDPTrainer(SimpleModel(8, 1), {}, device="cuda")


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 2), (4, 4)])
def test_a_rank_outside_its_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(UsageError, match=f"rank={rank} is not in a world of {world_size}"):
        DDPTrainer(SimpleModel(8, 1), CONFIG, "cpu", rank=rank, world_size=world_size)


def test_a_model_without_a_loss_is_told_so() -> None:
    with pytest.raises(ModelError, match=r"a tensor of shape \(4, 2\), not a scalar loss"):
        loss_of(torch.zeros(4, 2))
    with pytest.raises(ModelError, match="NoneType, not a scalar loss"):
        loss_of({"logits": torch.zeros(2)})
    assert loss_of((torch.tensor(2.5), "more")).item() == 2.5


def test_batches_that_run_out_are_named() -> None:
    with pytest.raises(UsageError, match="ran out"):
        DDPTrainer(Regression(), CONFIG, "cpu", data=iter(())).train(num_steps=1)


def test_batches_that_cannot_go_back_are_refused_before_the_first_step() -> None:
    config = {**CONFIG, "debug": {"on_nan": "rollback"}, "checkpoint": {"interval": 1}}
    with pytest.raises(UsageError, match=r"debug\.on_nan=rollback goes back to an earlier batch") as refused:
        DDPTrainer(Regression(), config, "cpu", data=[]).train(num_steps=1, save_checkpoints=True)
    assert "set debug.on_nan to skip or halt" in str(refused.value)


class TurnsBad(nn.Module):
    """sqrt(0) from its third call on: a loss of 0 whose gradient is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.good, self.bad = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        spread = (self.bad - self.bad.detach()) if self.calls >= 3 else self.bad
        return (self.good * x).sum() + spread.square().sum().sqrt()


def test_debug_nan_stops_at_the_step_and_names_the_parameters() -> None:
    watched = {**CONFIG, "debug": {"nan": True}}
    with pytest.raises(NumericsError, match=r"step 2 has non-finite gradients in 1 parameters, first bad \(3/3\)"):
        DDPTrainer(TurnsBad(), watched, "cpu", data=[(torch.ones(2),)]).train(num_steps=5)
    unwatched = {**CONFIG, "debug": {"nan": False}}
    result = DDPTrainer(TurnsBad(), unwatched, "cpu", data=[(torch.ones(2),)]).train(num_steps=5)
    assert [info.skipped for info in result.steps] == [False, False, True, True, True]


def test_a_model_without_parameters_is_a_sentence() -> None:
    with pytest.raises(UsageError, match="Identity has no parameter that learns"):
        DDPTrainer(nn.Identity(), CONFIG, "cpu")
