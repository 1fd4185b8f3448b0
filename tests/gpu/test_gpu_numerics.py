"""The numerics guard where the host runs ahead: a bad step is noticed a step late, and nothing is lost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from model_check import DDPTrainer, load_config
from model_check.blackbox.box import BOX
from model_check.diagnose import examine
from model_check.engine.arrangement import arrange_llama
from model_check.engine.inputs import RandomState, StepInputs
from model_check.engine.optimizer import build_optimizer
from model_check.engine.place import Place
from model_check.engine.precision import Precision
from model_check.engine.replaying import Replayer
from model_check.engine.step import TrainStep
from model_check.errors import NumericsError
from model_check.numerics.finite import LocalCheck
from model_check.record import RunDir
from tests.marked_lines import line_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    monkeypatch.chdir(tmp_path)
    BOX.run_dir = RunDir.create(tmp_path / "run")
    BOX.open(0, world_size=1)
    yield BOX.run_dir
    BOX.leave()
    BOX.run_dir = None


def events(run_dir: RunDir) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in run_dir.events(0).read_text().splitlines()]
    return [record for record in records if record["event"] == "nonfinite"]


class Net(nn.Module):
    """Dropout makes it draw random numbers: a step that is done again must draw the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.drop, self.head = nn.Linear(64, 64), nn.Dropout(0.2), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.body(x)))).square().mean()


class Pole(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(torch.relu(self.body(x)))
        return (y - y.detach()).square().sum().sqrt() + y.mean()  # the pole


def config(on_nan: str, precision: str = "fp32") -> dict[str, Any]:
    training = {"batch_size": 8, "context_length": 16, "learning_rate": 1e-2, "precision": precision}
    return {"training": training, "debug": {"on_nan": on_nan}}


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))


def batches(*bad_at: int, count: int) -> list[Any]:
    found = []
    for number in range(count):
        batch = X * (1 + number)
        if number in bad_at:
            batch = batch.clone()
            batch[3] = math.inf
        found.append((batch.cuda(),))
    return found


@pytest.mark.parametrize("bad_at", [(2,), (2, 3), (5,), (2, 4)])
def test_a_step_that_was_queued_behind_a_bad_one_is_done_again(run_dir: RunDir, bad_at: tuple[int, ...]) -> None:
    """Held weights, repeated steps: the losses are those of a run that waits for every step."""

    def losses(waits: bool) -> list[float]:
        settings = config("skip")
        settings["debug"]["nan"] = waits  # the host then reads every step before the next
        result = DDPTrainer(Net(), settings, "cuda", data=batches(*bad_at, count=6)).train(num_steps=6)
        assert [info.step for info in result.steps] == list(range(6))
        assert [info.skipped for info in result.steps] == [step in bad_at for step in range(6)]
        return [loss for step, loss in enumerate(result.losses) if step not in bad_at]

    assert losses(waits=False) == losses(waits=True)
    assert [event["step"] for event in events(run_dir)] == [*bad_at, *bad_at]
    assert all(event["deterministic"] and event["cause"] == "MC404" for event in events(run_dir))
    assert all(event["sample_ids"] == [3] for event in events(run_dir))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_line_of_a_backward_pole(run_dir: RunDir, precision: str) -> None:
    with pytest.raises(NumericsError, match=r"\[MC402\] step 0 "):
        DDPTrainer(Pole(), config("halt", precision), "cuda", data=[(X.cuda(),)]).train(num_steps=4)
    (found,) = examine(run_dir, live=False).findings
    assert (found.code, found.location) == ("MC402", line_of(__file__, "the pole"))


def test_a_float16_overflow(run_dir: RunDir) -> None:
    model = Net()
    with torch.no_grad():
        model.head.weight.fill_(6e4)
    with pytest.raises(NumericsError, match=r"\[MC403\] step 0 .* in head"):
        DDPTrainer(model, config("halt", "fp16"), "cuda", data=[(100 * X.cuda(),)]).train(num_steps=4)
    assert events(run_dir)[0]["module"] == "head"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_compiled_llama_is_replayed_line_by_line(run_dir: RunDir, recompute: str) -> None:
    """Compiled blocks, the fused loss and bf16 weights: as production trains."""
    place = Place(0, 1, torch.device("cuda", 0), "GPU0")
    settings = load_config(
        preset="debug",
        overrides=[
            "training.precision=bf16",
            "training.compile=on",
            "training.context_length=128",
            "model.hidden_size=256",
            f"parallel.activation_checkpointing={recompute}",
        ],
    )
    arranged = arrange_llama(settings, place, 4096)
    step = TrainStep(
        arranged.model,
        build_optimizer(arranged.bare_model, settings.training),
        arranged.precision,
        place,
        max_grad_norm=1.0,
        passes=arranged.passes,
    )
    tokens = torch.randint(0, 4096, (2, 129), device="cuda")
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    state = RandomState.capture(place.device)
    assert step([batch], 1e-4)[2].item() == 0.0
    inner = arranged.bare_model.layers[1].feed_forward  # type: ignore[index,union-attr]
    with torch.no_grad():
        inner.w1.weight.mul_(1e24)  # type: ignore[union-attr,operator]
        inner.w3.weight.mul_(1e24)  # type: ignore[union-attr,operator]
    assert step([batch], 1e-4)[5].item() == 1.0
    replayed = Replayer(step, arranged.bare_model).replay(StepInputs(1, 1e-4, (batch,), state), 1.0)
    assert replayed.own_fault and replayed.origin is not None
    assert (replayed.origin.direction, replayed.origin.site.module) == ("forward", "layers.1.feed_forward")
    assert "models/llama.py:" in replayed.origin.site.location and not replayed.origin.received


def test_the_check_of_own_gradients_never_waits_for_the_device() -> None:
    check = LocalCheck(torch.device("cuda"))
    gradients = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        check.begin()
        for gradient in gradients:
            check.look(gradient)
        clean = check.bad()
        gradients[1][17, 3:4].fill_(math.nan)  # assigning one element waits for the device
        check.look(gradients[1])
        bad = check.bad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (clean.item(), bad.item()) == (0.0, 1.0)


def test_a_healthy_run_never_waits_for_the_device(run_dir: RunDir) -> None:
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    place = Place(0, 1, torch.device("cuda", 0), "GPU0")
    step = TrainStep(model, optimizer, Precision.choose("fp32", place.device), place, max_grad_norm=1.0)
    step.holds_after_hit = True
    batch = (X.cuda(),)
    step([batch], 1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        RandomState.capture(place.device)
        packed = step([batch], 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert packed[5].item() == 0.0
