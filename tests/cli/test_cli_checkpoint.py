"""`model-check checkpoint` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model_check.checkpoint.peers import Peers
from model_check.checkpoint.saver import Saver
from model_check.cli.main import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["checkpoint", *arguments])
    return int(exit_.value.code or 0)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    saver = Saver(tmp_path / "all", Peers(), name="run", background=False)
    for step in (1, 2):
        saver.save(step, {"model.w": torch.full((8, 4), float(step))}, {"strategy": "ddp", "tokens": 64})
    return tmp_path / "all"


def test_verify_reads_all_and_fails_on_the_damaged_one(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", str(checkpoints)) == 0
    assert capsys.readouterr().out.count("whole ") == 2
    shard = checkpoints / "run" / "step_00000002" / "rank_00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    assert run("verify", str(checkpoints), "--json") == 1
    told = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(entry["ok"], entry.get("code")) for entry in told] == [(True, None), (False, "MC601")]


def test_inspect_and_convert_follow_latest(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", str(checkpoints / "latest")) == 0
    out = capsys.readouterr().out
    assert "step         2" in out and "strategy     ddp" in out and "[8, 4]" in out
    target = checkpoints.parent / "w.pt"
    assert run("convert", str(checkpoints / "latest"), str(target)) == 0
    assert torch.equal(torch.load(target, weights_only=True)["model"]["w"], torch.full((8, 4), 2.0))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify", "nowhere"), "there is no nowhere"),
        (("inspect", "."), "holds no weights that we know"),
        (("convert", "nowhere", "x.pt"), "there is no nowhere"),
    ],
)
def test_mistakes_are_a_sentence(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) != 0
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


def test_help_names_the_three() -> None:
    assert run("--help") == 0
