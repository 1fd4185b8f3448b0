"""The numerics guard in a whole run: each cause by its own means, what is left on disk, and what happens next."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model_check import DDPTrainer, SimpleModel
from model_check.blackbox.box import BOX
from model_check.data.loader import Batch
from model_check.diagnose import examine
from model_check.engine.guard import MOST_IN_A_ROW
from model_check.engine.place import Place
from model_check.engine.precision import Precision
from model_check.engine.step import TrainStep
from model_check.engine.trainer import TrainResult
from model_check.errors import NumericsError
from model_check.record import Finding, RunDir
from tests.marked_lines import line_of

BATCH = 4


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """A folder of its own, recorded as rank 0 of a run."""
    monkeypatch.chdir(tmp_path)
    BOX.run_dir = RunDir.create(tmp_path / "run")
    BOX.open(0, world_size=1)
    yield BOX.run_dir
    BOX.leave()
    BOX.run_dir = None


def config(precision: str = "fp32", rate: float = 1e-3, **sections: dict[str, Any]) -> dict[str, Any]:
    training = {"batch_size": BATCH, "context_length": 16, "learning_rate": rate, "precision": precision}
    return {"training": training, "data": {"samples": 300}, "debug": {"nan": True}, **sections}


def train(model: nn.Module, data: Any, steps: int = 4, **options: Any) -> TrainResult:
    torch.manual_seed(0)
    return DDPTrainer(model, config(**options), "cpu", data=data).train(num_steps=steps)


def events(run_dir: RunDir) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in run_dir.events(0).read_text().splitlines()]
    return [record for record in records if record["event"] == "nonfinite"]


def finding(run_dir: RunDir) -> Finding:
    """The one finding of the run: nothing else may be reported beside it."""
    (found,) = examine(run_dir, live=False).findings
    return found


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).square().mean()  # regression loss


class BackwardPole(Regression):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.body(x))
        return (y - y.detach()).square().sum().sqrt() + y.mean()  # backward pole


class MaskedMean(Regression):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.body(x) * mask).sum() / mask.sum()  # empty mask


class Deep(nn.Module):
    """Thirty layers without a normalisation: what one layer adds, the next multiplies."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(30))
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.normal_(0, gain / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)  # deep layer
        return x.square().mean()


X = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(1))


def test_a_pole_in_the_backward_pass(run_dir: RunDir) -> None:
    with pytest.raises(NumericsError, match=r"\[MC402\] step 0 has non-finite gradients in 4 parameters"):
        train(BackwardPole(), [(X,)])
    found = finding(run_dir)
    assert (found.code, found.ranks, found.step, found.phase) == ("MC402", [0], 0, "backward")
    assert found.location == line_of(__file__, "backward pole")
    assert (found.function, found.tensor) == ("forward", "head.bias.grad")
    assert (found.severity, found.certainty) == ("error", "proven")


def test_the_banner_reaches_whoever_trains_from_python(run_dir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NumericsError):
        train(BackwardPole(), [(X,)])
    (banner,) = [record for record in caplog.records if record.name == "model_check"]
    assert banner.levelname == "WARNING", "Python shows it on stderr where nobody has set up logging"
    assert "NaN" in banner.getMessage() and "Cause: [MC402]" in banner.getMessage()


def test_a_bad_sample_is_found_among_the_others(run_dir: RunDir) -> None:
    bad = X.clone()
    bad[2] = 1e30
    with pytest.raises(NumericsError, match=r"\[MC404\] step 2 .*forward of pow"):
        train(Regression(), [(X,), (X,), (bad,)])
    (event,) = events(run_dir)
    assert event["sample_ids"] == [2]
    assert finding(run_dir).location == line_of(__file__, "regression loss")


def test_the_loaders_own_sample_numbers_and_tokens_are_told(run_dir: RunDir) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 4)
            with torch.no_grad():
                self.table.weight[7] = 1e30

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self.table(tokens).square().mean()

    tokens = torch.arange(24).reshape(4, 6) % 6
    tokens[3, 1] = 7
    with pytest.raises(NumericsError, match="MC404"):
        train(Tokens(), [Batch(tokens, tokens, torch.tensor([40, 41, 52, 77]))])
    (event,) = events(run_dir)
    assert event["sample_ids"] == [77]
    assert event["token_ids"] == [[0, 7, 2, 3, 4, 5]]


def test_an_infinite_input_is_a_bad_sample(run_dir: RunDir) -> None:
    bad = X.clone()
    bad[1, 0] = math.inf
    with pytest.raises(NumericsError, match=r"\[MC404\] step 0 .*input 0 is not finite"):
        train(Regression(), [(bad,)])
    assert events(run_dir)[0]["sample_ids"] == [1]
    assert finding(run_dir).tensor == "input 0"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_empty_mask_in_every_format(run_dir: RunDir, precision: str) -> None:
    with pytest.raises(NumericsError, match=r"\[MC408\] step 0 "):
        train(MaskedMean(), [(X, torch.zeros(BATCH, 4))], precision=precision)
    assert finding(run_dir).location == line_of(__file__, "empty mask")


def test_labels_that_are_all_ignored(run_dir: RunDir) -> None:
    tokens = torch.ones(2, 8, dtype=torch.int64)
    with pytest.raises(NumericsError, match=r"\[MC408\] step 0 has a loss of nan"):
        train(SimpleModel(8, 1, 64), [(tokens, torch.full_like(tokens, -100))])
    found = finding(run_dir)
    assert "observed: every label of a batch is -100" in found.evidence
    assert (found.location or "").rpartition(":")[0].endswith("models/simple.py")


def test_a_float16_overflow_names_layer_magnitude_and_scale(run_dir: RunDir) -> None:
    model = Regression()
    with torch.no_grad():
        model.head.weight.mul_(6e4)
    with pytest.raises(NumericsError, match=r"\[MC403\] step 0 .* in head"):
        train(model, [(100 * X,)], precision="fp16")
    (event,) = events(run_dir)
    assert (event["module"], event["direction"]) == ("head", "forward")
    magnitude = event["facts"]["magnitude"]
    with torch.no_grad():
        true = model.head(model.body(100 * X)).abs().max().item()
    assert magnitude == pytest.approx(true, rel=0.02) and magnitude > 65504
    assert [entry["module"] for entry in event["ranges"]] == ["body"]


def test_weights_that_are_too_large_from_the_start(run_dir: RunDir) -> None:
    with pytest.raises(NumericsError, match=r"\[MC407\] step 0 "):
        train(Deep(gain=20.0), [(torch.randn(BATCH, 16),)])
    found = finding(run_dir)
    assert found.location == line_of(__file__, "deep layer")
    assert (found.tensor or "").startswith("layers.") and (found.tensor or "").endswith(": output of matmul")
    gains = [line for line in found.evidence if "enlarges what passes through it" in line]
    assert len(gains) == 1 and 18 < float(gains[0].split()[-2]) < 24


def test_a_learning_rate_of_the_size_of_the_weights(run_dir: RunDir) -> None:
    with pytest.raises(NumericsError, match=r"\[MC405\] step [1-3] "):
        train(Deep(), [(torch.randn(BATCH, 16),)], rate=1.0)
    told = [line for line in finding(run_dir).evidence if line.startswith("observed: learning rate 1, ")]
    assert len(told) == 1 and 3.8 < float(told[0].split()[4]) < 4.2, told


def test_gradients_that_grow_until_they_are_infinite(run_dir: RunDir) -> None:
    growing = [(X * 10.0**power,) for power in range(0, 30, 3)]
    with pytest.raises(NumericsError, match=r"\[MC406\] step 4 .*the gradient norm is too large for float32"):
        train(Regression(), growing, steps=12, rate=1e-6)
    assert any(line.startswith("observed: gradient norm ") for line in finding(run_dir).evidence)


def test_a_weight_that_is_bad_already(run_dir: RunDir) -> None:
    model = Regression()
    with torch.no_grad():
        model.body.weight[1, 2] = math.nan
    with pytest.raises(NumericsError, match=r"\[MC401\] step 0 .*parameter body.weight is not finite"):
        train(model, [(X,)])
    assert finding(run_dir).tensor == "body.weight"
    assert finding(run_dir).fix == [
        "start from weights that are finite: look at model.model_path, or --resume an older checkpoint"
    ]


def test_skipping_ends_where_every_step_is_bad(run_dir: RunDir) -> None:
    model = Regression()
    with torch.no_grad():
        model.body.weight[1, 2] = math.nan
    with pytest.raises(NumericsError, match=rf"\[MC401\] step {MOST_IN_A_ROW - 1} .*parameter body.weight"):
        train(model, [(X,)], steps=2 * MOST_IN_A_ROW, debug={"on_nan": "skip"})
    assert (
        f"observed: {MOST_IN_A_ROW} steps in a row are not finite, so it stops (debug.on_nan)"
        in finding(run_dir).evidence
    )
    assert finding(run_dir).severity == "error"


def test_skipping_goes_on_while_a_step_is_good_now_and_then(run_dir: RunDir) -> None:
    bad = X.clone()
    bad[0, 0] = math.inf
    batches = [*[(bad,)] * (MOST_IN_A_ROW - 1), (X,)]
    result = train(Regression(), batches, steps=2 * len(batches), debug={"on_nan": "skip"})
    assert [info.step for info in result.steps if not info.skipped] == [MOST_IN_A_ROW - 1, 2 * MOST_IN_A_ROW - 1]


class Once(Regression):
    """Bad in its third call only, as a bit that flips: the replay is its fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (math.nan if self.calls == 3 else 1.0)


def test_what_the_replay_does_not_show_again_is_transient(run_dir: RunDir) -> None:
    with pytest.raises(NumericsError, match=r"\[MC409\] step 2 .*not reproduced by a replay, suspect rank 0"):
        train(Once(), [(X,)])
    found = finding(run_dir)
    assert (found.code, found.certainty, found.ranks, found.location) == ("MC409", "suspected", [0], None)
    assert "observed: rank 0 runs on CPU0" in found.evidence
    assert events(run_dir)[0]["deterministic"] is False


class CannotBeRepeated(Once):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls == 3:
            raise RuntimeError("an exhausted generator")
        return super().forward(x)


def test_a_replay_that_fails_hides_nothing(run_dir: RunDir) -> None:
    with pytest.raises(NumericsError, match=r"\[MC401\] step 2 has a loss of nan .*an exhausted generator"):
        train(CannotBeRepeated(), [(X,)])
    found = finding(run_dir)
    assert (found.code, found.ranks, found.location, found.certainty) == ("MC401", [0], None, "observed")
    assert any("no line can be named: RuntimeError: an exhausted generator" in line for line in found.evidence)


class Noisy(Regression):
    """Bad for certain random numbers only: the replay must draw the same ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(())
        return super().forward(x) / (noise > 0.3)  # noisy division


def test_the_replay_draws_the_same_random_numbers(run_dir: RunDir) -> None:
    with pytest.raises(NumericsError, match=r"\[MC401\]"):
        train(Noisy(), [(X,)], steps=40)
    assert finding(run_dir).location == line_of(__file__, "noisy division")


def test_dumps_are_where_the_guides_look_for_them(run_dir: RunDir, tmp_path: Path) -> None:
    with pytest.raises(NumericsError):
        train(BackwardPole(), [(X,)])
    content = pickle.loads((tmp_path / ".checkpoints/debug/nan_debug_step_0.pkl").read_bytes())
    assert sorted(content["gradients"]) == ["body.bias", "body.weight", "head.bias", "head.weight"]
    assert all(math.isnan(value) for value in content["gradients"]["head.bias"])
    assert content["location"] == line_of(__file__, "backward pole")
    weights = torch.load(tmp_path / ".checkpoints/nan_grad_step_0.pt", weights_only=True)
    assert weights["model"]["head.weight"].shape == (1, 4)
    assert events(run_dir)[0]["dump"] == ".checkpoints/debug/nan_debug_step_0.safetensors"


def test_no_dump_where_none_is_wanted(run_dir: RunDir, tmp_path: Path) -> None:
    with pytest.raises(NumericsError):
        train(BackwardPole(), [(X,)], debug={"nan": True, "dump_gb": 0})
    assert not (tmp_path / ".checkpoints").exists()
    assert "dump" not in events(run_dir)[0]


def test_a_dump_that_cannot_be_written_hides_nothing(run_dir: RunDir, tmp_path: Path) -> None:
    (tmp_path / ".checkpoints").write_text("a file is in the way")
    with pytest.raises(NumericsError, match="MC402"):
        train(BackwardPole(), [(X,)])
    assert finding(run_dir).code == "MC402"


def test_skipping_goes_on_without_the_step_and_is_a_warning(run_dir: RunDir) -> None:
    bad = X.clone()
    bad[0] = math.nan
    result = train(Regression(), [(X,), (bad,)], steps=12, debug={"on_nan": "skip"})
    assert [info.skipped for info in result.steps] == [False, True] * 6
    assert all(math.isfinite(info.loss) for info in result.steps[::2])
    assert [event["step"] for event in events(run_dir)] == [1, 3, 5], "the first three are explained"
    found = finding(run_dir)
    assert (found.code, found.severity, found.step) == ("MC404", "warning", 1)
    assert "observed: again in 2 later steps, last 5" in found.evidence
    assert any(line.startswith("inferred: there may be more") for line in found.evidence)


def test_a_skipped_step_leaves_the_training_as_if_it_had_not_been(run_dir: RunDir) -> None:
    bad = X.clone()
    bad[0] = math.nan
    skipped = train(Regression(), [(X,), (bad,), (X,)], steps=3, rate=0.1, debug={"on_nan": "skip"})
    clean = train(Regression(), [(X,)], steps=2, rate=0.1)
    assert [skipped.losses[0], skipped.losses[2]] == clean.losses


class FailsOn(nn.Module):
    """Cannot stand one sequence of tokens, or some."""

    def __init__(self, poison: torch.Tensor | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = SimpleModel(8, 1, 4096)
        self.poison = poison
        self.seen: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.seen.append(tokens.clone())
        hit = self.poison is not None and bool((tokens == self.poison.view(-1, 1, tokens.shape[1])).all(-1).any())
        return self.inner(tokens, targets) / (0.0 if hit else 1.0)


def test_going_back_repeats_the_steps_since_the_checkpoint_and_leaves_the_data_out(run_dir: RunDir) -> None:
    saved = {"checkpoint": {"interval": 2}, "debug": {"on_nan": "rollback"}}
    clean_model = FailsOn(None)
    clean = train(clean_model, None, steps=8, rate=1e-2)
    model = FailsOn(clean_model.seen[6][0])
    result = DDPTrainer(model, config(rate=1e-2, **saved), "cpu").train(8, save_checkpoints=True, checkpoint_interval=4)
    assert [info.step for info in result.steps] == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7]
    assert result.losses[:6] == clean.losses[:6]
    assert not math.isfinite(result.losses[6])
    assert result.losses[7:9] == clean.losses[4:6], "the same weights, data and random numbers"
    assert torch.equal(model.seen[-2], clean_model.seen[7]), "step 6 now trains on what came after"
    assert result.steps[-1].step == 7 and math.isfinite(result.losses[-1])
    (event,) = events(run_dir)
    assert (event["action"], event["step"]) == ("rollback", 6)
    assert finding(run_dir).severity == "warning"


def test_going_back_ends_after_three_times(run_dir: RunDir) -> None:
    class Cursed(FailsOn):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.seen.append(tokens)
            late = len(self.seen) > 3
            return self.inner(tokens, targets) / (0.0 if late else 1.0)

    saved = {"checkpoint": {"interval": 2}, "debug": {"on_nan": "rollback"}}
    trainer = DDPTrainer(Cursed(None), config(**saved), "cpu")
    with pytest.raises(NumericsError, match="MC401"):
        trainer.train(8, save_checkpoints=True, checkpoint_interval=2)
    assert [event["action"] for event in events(run_dir)] == ["rollback"] * 3 + ["halt"]


def test_a_long_run_may_meet_a_bad_batch_now_and_then(run_dir: RunDir) -> None:
    clean = FailsOn(None)
    train(clean, None, steps=16, rate=1e-2)
    model = FailsOn(torch.stack([clean.seen[number][0] for number in (3, 6, 9, 12, 15)]))
    settings = config(rate=1e-2, checkpoint={"interval": 2}, debug={"on_nan": "rollback"})
    result = DDPTrainer(model, settings, "cpu").train(11, save_checkpoints=True, checkpoint_interval=2)
    assert [event["action"] for event in events(run_dir)] == ["rollback"] * 4
    assert [event["step"] for event in events(run_dir)] == [3, 5, 7, 9], "each has a newer checkpoint before it"
    assert result.steps[-1].step == 10 and math.isfinite(result.losses[-1])
    assert finding(run_dir).severity == "warning"


def test_batches_that_are_bad_one_after_the_other_are_all_left_out(run_dir: RunDir) -> None:
    clean = FailsOn(None)
    train(clean, None, steps=8, rate=1e-2)
    model = FailsOn(torch.stack([clean.seen[5][0], clean.seen[6][0]]))
    settings = config(rate=1e-2, checkpoint={"interval": 2}, debug={"on_nan": "rollback"})
    result = DDPTrainer(model, settings, "cpu").train(6, save_checkpoints=True, checkpoint_interval=4)
    assert [info.step for info in result.steps] == [0, 1, 2, 3, 4, 5, 4, 5, 4, 5]
    assert torch.equal(model.seen[-1], clean.seen[7])
    (event, again) = events(run_dir)
    assert (event["action"], event["step"]) == (again["action"], again["step"]) == ("rollback", 5)
    assert "observed: the run went back to a checkpoint 2 times, from step 5, 5" in finding(run_dir).evidence


def test_with_nothing_to_go_back_to_the_run_stops_and_says_so(run_dir: RunDir) -> None:
    clean = FailsOn(None)
    train(clean, None, steps=3, rate=1e-2)
    settings = config(rate=1e-2, checkpoint={"interval": 2}, debug={"on_nan": "rollback"})
    trainer = DDPTrainer(FailsOn(clean.seen[1][0]), settings, "cpu")
    with pytest.raises(NumericsError, match="step 1"):
        trainer.train(4, save_checkpoints=True, checkpoint_interval=2)
    (event,) = events(run_dir)
    assert (event["action"], event["step"]) == ("halt", 1)
    found = finding(run_dir)
    assert (found.severity, found.ranks) == ("error", [0])
    assert "observed: there is no checkpoint, so it stops instead of going back (debug.on_nan)" in found.evidence


class Steep(Regression):
    """Its loss is small, its scaled gradients leave float16 until the scale has come down."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.body(x)) * 64.0
        return F.smooth_l1_loss(y, torch.zeros_like(y), reduction="sum")


def test_a_healthy_float16_run_that_skips_to_lower_its_scale_is_not_reported(run_dir: RunDir) -> None:
    result = train(Steep(), [(X,)], steps=12, precision="fp16", rate=1e-4)
    skipped = [info.skipped for info in result.steps]
    assert any(skipped), "the scale came down at least once"
    assert not all(skipped) and skipped == sorted(skipped, reverse=True)
    assert events(run_dir) == [] and examine(run_dir, live=False).findings == []


def test_a_float16_gradient_that_is_bad_at_any_scale_is_reported(run_dir: RunDir) -> None:
    with pytest.raises(NumericsError, match=r"\[MC402\] step 16 "):
        train(BackwardPole(), [(X,)], steps=20, precision="fp16")
    assert finding(run_dir).location == line_of(__file__, "backward pole")


def test_weights_are_held_until_the_host_has_looked() -> None:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step = TrainStep(model, optimizer, Precision.choose("fp32", torch.device("cpu")), Place(), max_grad_norm=1.0)
    step.holds_after_hit = True
    before = model.head.weight.detach().clone()
    assert step([(torch.full((1, 4), math.nan),)], 0.1)[5].item() == 1.0
    assert step([(X,)], 0.1)[2].item() == 0.0, "this one is finite"
    assert torch.equal(model.head.weight, before), "and changes nothing, since nobody has looked at the one before"
    step.release()
    step([(X,)], 0.1)
    assert not torch.equal(model.head.weight, before)
