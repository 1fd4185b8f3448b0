"""What resume restores: everything a step depends on, so that the next step is the one that would have been."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from model_check import load_config
from model_check.checkpoint import layout
from model_check.checkpoint.manifest import Manifest
from model_check.checkpoint.peers import Peers
from model_check.checkpoint.shards import read_tensor
from model_check.checkpoint.verify import verify
from model_check.data import Cursor, prepare
from model_check.engine.data_and_shape import data_spec
from model_check.engine.feed import open_loader
from model_check.engine.loop import StepInfo
from model_check.engine.place import Place
from model_check.engine.saving import Saving
from model_check.engine.session import Session
from model_check.engine.worker import assemble, continue_from, fit
from model_check.errors import CheckpointError


class Dicey(nn.Module):
    """A model that depends on every generator there is."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, width)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(width, 4096)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.embed(tokens)) * (1 + 0.1 * random.random()) * (1 + 0.1 * np.random.rand())
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def session(precision: str = "fp32", width: int = 16, **values: Any) -> Session:
    settings = {
        "training.batch_size": 2,
        "training.context_length": 32,
        "training.learning_rate": 1e-2,
        "training.precision": precision,
        "training.max_steps": 12,
        "data.samples": 300,
        "checkpoint.interval": 5,
        **values,
    }
    config = load_config(values={key: (value, "test") for key, value in settings.items()})
    place = Place()
    loader = open_loader(config, place, prepare(data_spec(config)).train)
    torch.manual_seed(0)
    return assemble(config, place, loader, model=Dicey(width))


def train(it: Session, *, until: int, resume: str | None = None, save: bool = False) -> list[StepInfo]:
    peers = Peers()
    lineage, _ = continue_from(resume, it, peers)
    saving = None
    if save:
        saving = Saving(it, peers, name="run", last_step=until, lineage=lineage)
    steps: list[StepInfo] = []
    fit(it, on_step=steps.append, max_steps=until, saving=saving)
    return steps


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_steps_after_a_resume_are_those_of_an_uninterrupted_run(precision: str) -> None:
    whole = [info.loss for info in train(session(precision), until=12)]
    first = train(session(precision), until=7, save=True)
    assert [info.loss for info in first] == whole[:7]
    assert [info.step for info in first if info.save_pause_s is not None] == [4, 6]
    random.random(), np.random.rand(), torch.rand(3)  # a new process would stand elsewhere
    resumed = session(precision)
    rest = train(resumed, until=12, resume="auto")
    assert [info.step for info in rest] == [7, 8, 9, 10, 11]
    assert [info.loss for info in rest] == whole[7:]
    assert rest[-1].tokens == 12 * 2 * 32


def test_the_loss_scale_goes_on_where_it_was() -> None:
    it = session("fp16")
    it.train_step.loss_scale.scale.fill_(512.0)
    train(it, until=5, save=True)
    resumed = session("fp16")
    continue_from("auto", resumed, Peers())
    assert resumed.train_step.loss_scale.state_dict() == {"scale": 512.0, "good_steps": 5}
    assert resumed.first_step == 5 and resumed.loader.cursor == it.loader.cursor


@pytest.mark.parametrize(("saved", "continued"), [("fp16", "fp32"), ("fp16", "bf16"), ("fp32", "fp16")])
def test_a_loss_scale_is_not_carried_into_another_number_format(saved: str, continued: str) -> None:
    """Without scaling, a scale of 65536 would divide every gradient; with it, one of 1 would lose the small ones."""
    train(session(saved), until=5, save=True)
    resumed, fresh = session(continued), session(continued)
    continue_from("auto", resumed, Peers())
    assert resumed.first_step == 5
    assert resumed.train_step.loss_scale.state_dict() == fresh.train_step.loss_scale.state_dict()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"system.seed": 7}, "system.seed was 42 and is 7"),
        ({"training.context_length": 16}, "training.context_length was 32 and is 16"),
        ({"data.samples": 200}, "its tokens are others"),
        ({"data.tokenizer": "bytes"}, "its tokens are others"),
    ],
)
def test_a_cursor_into_other_data_is_not_followed_and_that_is_said(changed: dict[str, Any], words: str) -> None:
    train(session(), until=5, save=True)
    resumed = session(**changed)
    _, notes = continue_from("auto", resumed, Peers(), lineage=Path(".checkpoints/run"))
    (note,) = [line for line in notes if line.startswith("[MC609]")]
    assert words in note and "starts at its first sample" in note
    assert resumed.first_step == 5 and resumed.loader.cursor == Cursor()


def test_another_batch_size_goes_on_in_the_same_data_without_a_word() -> None:
    it = session()
    train(it, until=5, save=True)
    resumed = session(**{"training.batch_size": 3, "training.learning_rate": 1e-3})
    _, notes = continue_from("auto", resumed, Peers())
    assert resumed.loader.cursor == it.loader.cursor != Cursor()
    assert [line for line in notes if "MC6" in line] == []


def altered(change: Callable[[Manifest], Manifest]) -> None:
    """Writes the manifest of the newest checkpoint anew, checksum and all, as another program would have made it."""
    folder = Path(".checkpoints/latest").resolve()
    change(Manifest.read(folder)).write(folder)


def test_moments_that_are_not_in_the_checkpoint_are_not_made_up() -> None:
    train(session(), until=5, save=True)
    lost = "optimizer.head.weight.exp_avg"
    altered(lambda m: replace(m, tensors={name: entry for name, entry in m.tensors.items() if name != lost}))
    with pytest.raises(CheckpointError, match=rf"{lost} is not there.*training.optimizer_states") as caught:
        continue_from("auto", session(), Peers())
    assert caught.value.code == "MC607"


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"step": -7},
        {"step": float("inf")},
        {"tokens": "many"},
        {"cursor": {"epoch": 0}},
        {"cursor": {"epoch": 0, "position": -1}},
        {"loss_scale": 3},
        {"loss_scale": {"scale": "x", "good_steps": 0}},
    ],
)
def test_progress_that_makes_no_sense_is_a_sentence(extra: dict[str, Any]) -> None:
    train(session(), until=5, save=True)
    altered(lambda m: replace(m, extra={**m.extra, **extra} if extra else {}))
    with pytest.raises(CheckpointError, match="does not say where training stood") as caught:
        continue_from("auto", session(), Peers())
    assert caught.value.code == "MC601"


def test_a_model_of_another_width_is_refused_with_its_tensors() -> None:
    train(session(), until=5, save=True)
    with pytest.raises(CheckpointError, match=r"model\.embed\.weight is \[4096, 16\] there and \[4096, 24\] here") as e:
        continue_from("auto", session(width=24), Peers())
    assert e.value.code == "MC607"


def test_best_by_validation_loss_is_kept_and_said_in_the_manifest() -> None:
    it = session(**{"checkpoint.interval": 1, "checkpoint.keep": 1})
    saving = Saving(it, Peers(), name="run", last_step=99)
    losses = [3.0, 1.0, 2.0, 2.5]
    for step, loss in enumerate(losses):
        info = StepInfo(step=step, loss=loss, lr=0.1, grad_norm=1.0, tokens=64, eta_s=0.0, stop=False, val_loss=loss)
        train_once(it)
        saving.save(info, wait=True)
    assert sorted(path.name for path in saving.folder.glob("step_*")) == ["step_00000001", "step_00000003"]
    assert saving.committed == 3


def test_a_folder_of_plain_weights_starts_a_run_at_step_0() -> None:
    given = {name: torch.full_like(tensor, 0.25) for name, tensor in Dicey().state_dict().items()}
    Path("folder").mkdir()
    save_file(given, "folder/model.safetensors")
    it = session()
    _, notes = continue_from("folder", it, Peers())
    assert notes == ["weights from folder (3 tensors): optimizer, data and step count start fresh"]
    assert it.first_step == 0 and bool((it.bare_model.get_parameter("head.weight") == 0.25).all())


def test_an_export_that_lies_beside_checkpoints_does_not_stand_in_for_them() -> None:
    train(session(), until=5, save=True)
    save_file(dict(Dicey().state_dict()), ".checkpoints/run/model.safetensors")
    for folder in (".checkpoints", ".checkpoints/run"):
        it = session()
        continue_from(folder, it, Peers())
        assert it.first_step == 5


def test_a_run_whose_last_save_failed_ends_with_that_word() -> None:
    it = session(**{"training.max_steps": 10})
    said: list[str] = []
    saving = Saving(it, Peers(), name="run", last_step=10, say=said.append)

    def on_step(info: StepInfo) -> None:
        if info.step == 7:  # a file where the next save wants its folder
            layout.staging_folder(saving.folder, 9, layout.owner()).write_text("in the way")

    with pytest.raises(CheckpointError, match="the checkpoint of step 9"):
        fit(it, on_step=on_step, max_steps=10, saving=saving)
    assert said[-1] == "checkpoint: the state after step 9 is not saved; the newest is of step 4"


def train_once(it: Session) -> None:
    it.train_step([next(iter(it.loader))], 1e-3)


def test_a_checkpoint_holds_the_step_it_was_taken_after_though_training_went_on() -> None:
    it = session(**{"checkpoint.interval": 4})
    saving = Saving(it, Peers(), name="run", last_step=12)
    taken: dict[int, dict[str, torch.Tensor]] = {}
    lines: list[float | None] = []

    def on_step(info: StepInfo) -> None:
        lines.append(info.save_pause_s)
        if saving.is_due(info.step):
            taken[info.step] = {name: tensor.clone() for name, tensor in it.state().items()}

    fit(it, on_step=on_step, max_steps=12, saving=saving)
    assert [step for step, pause in enumerate(lines) if pause is not None] == [3, 7, 11]
    for step, expected in taken.items():
        stored = verify(saving.folder / f"step_{step:08d}")
        for name, tensor in expected.items():
            assert torch.equal(read_tensor(stored.path, stored.manifest.tensors[name]), tensor), f"{name} of {step}"
    assert not torch.equal(taken[3]["model.head.weight"], taken[7]["model.head.weight"])
