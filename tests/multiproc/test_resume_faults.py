"""What can be wrong with the checkpoint to resume from: named on the command line, before any step."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model_check.checkpoint.manifest import Manifest
from model_check.record import RunDir
from model_check.record.ring import read_ring
from tests.conftest import BIN, TINY, Outcome, Shell


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine steps of two ranks with checkpoints after 2, 5 and 8."""
    shell = Shell(tmp_path_factory.mktemp("trained"))
    done = shell.train("--nproc", "2", "--max-steps", "9", "--set", "checkpoint.interval=3")
    assert done.code == 0, done.err
    return shell.folder


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Shell:
    for name in (".checkpoints", ".cache"):
        shutil.copytree(trained / name, tmp_path / "copy" / name, symlinks=True)
    return Shell(tmp_path / "copy")


def checkpoint(shell: Shell, step: int) -> Path:
    return shell.folder / ".checkpoints" / "run1" / f"step_{step:08d}"


def resume(shell: Shell, *arguments: str, what: str = "auto") -> Outcome:
    run_dir = shell.folder / "resumed"
    done = shell.train("--nproc", "2", "--max-steps", "10", "--resume", what, "--run-dir", str(run_dir), *arguments)
    done.run_dir = run_dir
    return done


def first_finding(done: Outcome) -> tuple[str, list[int]]:
    finding = done.verdict()["findings"][0]
    return finding["code"], finding["ranks"]


def test_auto_passes_over_what_is_damaged_and_says_why(copy: Shell) -> None:
    shard = checkpoint(copy, 8) / "rank_00001.bin"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    (checkpoint(copy, 5) / "rank_00000.bin").unlink()
    done = resume(copy)
    assert done.code == 0, done.err
    assert "passed over step_00000008: [MC601]" in done.out and "has another checksum" in done.out
    assert "passed over step_00000005: [MC602]" in done.out
    assert "continuing after step 2 from" in done.out
    assert [r["step"] for r in done.metrics()] == list(range(3, 10))
    for rank in range(2):
        crumbs = read_ring(RunDir(done.run_dir).ring(rank)).crumbs
        assert [c.step for c in crumbs if c.phase == "step"] == list(range(3, 10)), "no other step is in the black box"


def test_auto_takes_the_highest_step_though_the_clock_was_set_back(copy: Shell) -> None:
    earlier = Manifest.read(checkpoint(copy, 5))
    replace(earlier, saved_at=earlier.saved_at + 3600).write(checkpoint(copy, 5))
    done = resume(copy)
    assert done.code == 0, done.err
    assert "continuing after step 8 from" in done.out


def test_a_damaged_checkpoint_never_takes_the_place_of_a_good_one(copy: Shell) -> None:
    with (checkpoint(copy, 8) / "rank_00000.bin").open("r+b") as file:
        file.write(b"damaged")
    done = resume(copy, "--max-steps", "8", "--set", "checkpoint.interval=7", "--set", "checkpoint.keep=1")
    assert done.code == 0, done.err
    assert "continuing after step 5 from" in done.out
    kept = sorted(path.name for path in checkpoint(copy, 8).parent.glob("step_*"))
    assert kept == ["step_00000007", "step_00000008"], "the new one stays, whatever lies beyond it"
    assert copy.model_check("checkpoint", "verify", str(checkpoint(copy, 7))).code == 0


def test_a_changed_shape_is_named_before_any_step(copy: Shell) -> None:
    done = resume(copy, "--set", "model.hidden_size=128")
    assert done.code == 1
    assert first_finding(done) == ("MC607", [0, 1])
    assert "model.tok_embed.weight is [4096, 64] there and [4096, 128] here" in done.out + done.err
    assert not (done.run_dir / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_training_on_other_data_is_not_adopted_unasked(copy: Shell) -> None:
    """Only the shapes match: it may be another experiment."""
    done = resume(copy, "--set", "data.samples=300")
    assert done.code == 1 and first_finding(done) == ("MC609", [0, 1])
    named = str(checkpoint(copy, 8))
    assert f"--resume {named}" in done.out + done.err
    assert not (done.run_dir / "metrics.jsonl").exists()
    shutil.rmtree(done.run_dir)
    assert "continuing after step 8 from" in resume(copy, "--set", "data.samples=300", what=named).out


@pytest.mark.slow
def test_a_named_checkpoint_that_is_damaged_is_refused(copy: Shell) -> None:
    path = checkpoint(copy, 8)
    with (path / "rank_00000.bin").open("r+b") as file:
        file.truncate(1000)
    done = resume(copy, what=str(path))
    assert done.code == 1
    assert first_finding(done)[0] == "MC601"
    assert "rank_00000.bin has 1000 bytes instead of" in done.out + done.err


@pytest.mark.slow
def test_an_older_one_branches_off_and_leaves_the_newer_ones(copy: Shell) -> None:
    done = resume(copy, "--set", "checkpoint.interval=5", what=str(checkpoint(copy, 2)))
    assert done.code == 0, done.err
    folders = sorted(path.name for path in (copy.folder / ".checkpoints").iterdir())
    assert folders == ["latest", "resumed", "run1"]
    assert json.loads((checkpoint(copy, 8) / "manifest.json").read_text())["world_size"] == 2


@pytest.mark.slow
def test_weights_of_the_old_world_start_a_run(copy: Shell, trained: Path) -> None:
    exported = copy.model_check("checkpoint", "convert", str(checkpoint(copy, 8)), "plain.pt")
    assert exported.code == 0, exported.err
    state = torch.load(copy.folder / "plain.pt", weights_only=True)["model"]
    torch.save({f"module._orig_mod.{name}": value for name, value in state.items()}, copy.folder / "old.pt")
    done = resume(copy, what="old.pt")
    assert done.code == 0, done.err
    assert "[MC605] names in old.pt carried _orig_mod., module.; taken off" in done.out
    fresh = json.loads((trained / "run1" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    first = done.metrics()[0]
    assert first["step"] == 0 and first["loss"] != fresh


@pytest.mark.parametrize(("policy", "code"), [("continue", 1), pytest.param("stop", 1, marks=pytest.mark.slow)])
def test_a_full_disk_goes_on_or_stops_as_configured(shell: Shell, policy: str, code: int) -> None:
    sets = ("--set", "checkpoint.interval=3", "--set", f"checkpoint.on_full={policy}")
    # Files may grow to 2 MB: enough for metrics and logs, too little for the state of this model.
    done = shell.run(
        "bash",
        "-c",
        'ulimit -f 2000; exec "$0" "$@"',
        *(str(BIN / "model-check"), "train", "--debug", "--run-dir", "limited", "--nproc", "2", "--max-steps", "9"),
        *(word for value in TINY for word in ("--set", value)),
        *sets,
    )
    assert done.code == code, done.err
    assert "[MC604] the checkpoint of step 2 needs" in done.out and "are free in" in done.out
    steps = len((shell.folder / "limited" / "metrics.jsonl").read_text().splitlines())
    assert steps == 9 if policy == "continue" else 3 <= steps < 9
    verdict = json.loads((shell.folder / "limited" / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["findings"][0]["code"]) == ("failed", "MC604")
    assert "there is no older checkpoint" in done.out and "intact" not in done.out
