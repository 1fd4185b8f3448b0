"""The doors of the earlier guides: each command they show has its counterpart here and works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import BIN, ROOT, TINY, Shell

SETS = [word for value in TINY for word in ("--set", value)]


def test_pretrain_main_trains_on_one_rank(shell: Shell) -> None:
    done = shell.run(str(BIN / "python"), str(ROOT / "pretrain_main.py"), "--debug", "--max-steps", "2", *SETS)
    assert done.code == 0, done.err
    assert len(re.findall(r"^\[CPU0\] Step \[", done.out, re.M)) == 2
    assert "[CPU1]" not in done.out


@pytest.mark.parametrize("door", ["pretrain_main.py", "train.py", "config.py", "scripts/train_ddp.py"])
def test_a_door_finds_the_installed_packages_from_a_fresh_shell(shell: Shell, tmp_path: Path, door: str) -> None:
    """After run.sh the packages are in .venv beside the doors; the shell's own interpreter has none of them."""
    for folder in ("scripts", "model_check"):
        (tmp_path / "copy" / folder).parent.mkdir(exist_ok=True)
        shutil.copytree(ROOT / folder, tmp_path / "copy" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pretrain_main.py", "train.py", "config.py"):
        shutil.copy(ROOT / name, tmp_path / "copy" / name)
    installed = tmp_path / "copy" / ".venv" / "bin"
    installed.mkdir(parents=True)
    (installed / "python").write_text(f'#!/bin/sh\nexec "{BIN / "python"}" "$@"\n')
    (installed / "python").chmod(0o755)
    bare = [sys._base_executable, "-S", str(tmp_path / "copy" / door)]
    done = shell.run(*bare, "--debug", "--dry-run")
    assert done.code == 0 and '"values"' in done.out, done.err
    (installed / "python").unlink()
    lost = shell.run(*bare, "--debug", "--dry-run")
    assert lost.code == 1 and "bash run.sh --debug" in lost.err and "Traceback" not in lost.err


@pytest.mark.slow
def test_the_launch_module_of_torch_makes_ranks_of_run_6_test(shell: Shell) -> None:
    done = shell.run(
        *(str(BIN / "python"), "-m", "torch.distributed.launch", "--nproc_per_node=2", "--standalone"),
        *(str(ROOT / "scripts" / "run_6_test.py"), "--fast_dev_run", "1", "--num_workers", "0", *SETS),
    )
    assert done.code == 0, done.err
    for rank in (0, 1):
        assert re.search(rf"^\[CPU{rank}\] Step \[\d/1\]", done.out, re.M), done.out


def test_the_check_of_a_configuration_is_where_the_guides_import_it_from(shell: Shell) -> None:
    code = "from src.utils.validation import validate_config; print(validate_config({'model': {'hidden_size': 60}}))"
    done = shell.run(str(BIN / "python"), "-c", code, PYTHONPATH=str(ROOT))
    assert done.code == 0 and done.out.startswith("(False, ['model.hidden_size must be divisible"), done.err


def test_a_file_that_has_become_a_preset_is_named(shell: Shell) -> None:
    done = shell.model_check("train", "--config", "config_stable.json", "--dry-run")
    assert done.code == 2 and "did you mean --preset stable?" in done.err


@pytest.mark.slow
def test_torchrun_makes_ranks_of_pretrain_main(shell: Shell) -> None:
    run_dir = shell.folder / "by-torchrun"
    done = shell.run(
        str(BIN / "torchrun"),
        "--nproc_per_node=2",
        "--standalone",
        str(ROOT / "pretrain_main.py"),
        "--debug",
        "--fast_dev_run",
        "2",
        "--num_workers",
        "0",
        "--run-dir",
        str(run_dir),
        *SETS,
    )
    assert done.code == 0, done.err
    for rank in (0, 1):
        assert len(re.findall(rf"^\[CPU{rank}\] Step \[\d/2\]", done.out, re.M)) == 2
    ours = shell.train("--max-steps", "2", "--nproc", "2")
    done.run_dir = run_dir
    assert done.losses() == ours.losses(), "one rank of a foreign launcher trains as one of ours"


@pytest.mark.slow
def test_a_job_that_torchrun_starts_again_sets_its_first_life_aside(shell: Shell) -> None:
    run_dir = shell.folder / "twice"
    for ranks, steps, resume in ((2, 3, []), (1, 5, ["--resume", "auto"])):
        done = shell.run(
            *(str(BIN / "torchrun"), f"--nproc_per_node={ranks}", "--standalone", str(ROOT / "pretrain_main.py")),
            *("--debug", "--max-steps", str(steps), "--set", "checkpoint.interval=3", "--run-dir", str(run_dir)),
            *(*SETS, *resume),
        )
        assert done.code == 0, done.err
    assert sorted(path.name for path in (run_dir / "events").glob("rank-*")) == ["rank-00000.jsonl"]
    assert sorted(path.name for path in (run_dir / "blackbox").glob("*.ring")) == ["rank-00000.ring"]
    aside = run_dir / "attempts" / "1"
    assert sorted(path.name for path in (aside / "blackbox").glob("*.ring")) == [
        "rank-00000.ring",
        "rank-00001.ring",
    ]
    done.run_dir = run_dir
    assert [record["step"] for record in done.metrics()] == [0, 1, 2, 3, 4], "metrics belong to the run, not to a life"
    verdict = json.loads(shell.model_check("diagnose", str(run_dir), "--json").out)
    assert verdict["world_size"] == 1


def test_prepare_dataset_builds_once_and_verifies(shell: Shell) -> None:
    door = [str(BIN / "python"), str(ROOT / "prepare_dataset.py"), "--debug", "--set", "data.samples=300"]
    first = shell.run(*door)
    assert first.code == 0 and "prepared in" in first.out, first.err
    again = shell.run(*door, "--verify")
    assert again.code == 0 and "from the cache" in again.out
    assert "every block matches its checksum" in again.out


def test_scripts_of_the_guides_are_there_and_parse() -> None:
    expected = {
        "run_training.sh",
        "start.sh",
        "start_single.sh",
        "start_4gpu.sh",
        "train_gpu.sh",
        "train_auto_gpu.sh",
        "train_ddp.py",
        "train_fsdp.py",
        "run_6_test.py",
    }
    assert expected <= {path.name for path in (ROOT / "scripts").iterdir()}
    for path in [*(ROOT / "scripts").glob("*.sh"), ROOT / "run.sh", ROOT / "test.sh"]:
        assert subprocess.run(["bash", "-n", path]).returncode == 0, path


def test_the_fsdp_door_asks_for_shards(shell: Shell) -> None:
    done = shell.run(sys.executable, str(ROOT / "scripts" / "train_fsdp.py"), "--debug", "--dry-run")
    assert done.code == 0, done.err
    assert json.loads(done.out)["values"]["parallel"]["strategy"] == "fsdp"


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("start.sh", ["14b"], "--preset 14b"),
        ("start.sh", [], "--preset 32b"),
        ("start_single.sh", ["--dry-run"], "--preset 14b --nproc 1 --dry-run"),
        ("start_4gpu.sh", [], "--preset 32b --nproc 4"),
        ("train_gpu.sh", ["3", "--debug"], "--gpus 3 --debug"),
        ("train_gpu.sh", ["--debug"], "--gpus 0 --debug"),
        ("train_auto_gpu.sh", ["--config", "my.json"], "--gpus auto --config my.json"),
    ],
)
def test_scripts_pass_the_right_flags_on(tmp_path: Path, script: str, arguments: list[str], expected: str) -> None:
    """The scripts call run.sh beside their folder: a run.sh that prints its arguments shows what they pass."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / script).write_text((ROOT / "scripts" / script).read_text())
    (tmp_path / "run.sh").write_text('echo "$@"\n')
    done = subprocess.run(["bash", tmp_path / "scripts" / script, *arguments], capture_output=True, text=True)
    assert done.stdout.strip() == expected
