"""What ends a run before its ranks start: it is in the verdict, and nothing secret is in the run directory."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.conftest import Shell


def test_a_data_fault_is_in_the_verdict(shell: Shell) -> None:
    (shell.folder / "empty.txt").write_text("")
    done = shell.train("--nproc", "1", "--set", "data.dataset=empty.txt")
    assert done.code == 1 and "MC904" in done.err and "Traceback" not in done.err
    verdict = done.verdict()
    assert (verdict["outcome"], verdict["exit_code"]) == ("failed", 1)
    assert verdict["findings"][0]["code"] == "MC904"


def test_a_password_in_a_url_stays_out_of_the_run_directory(shell: Shell) -> None:
    done = shell.train("--nproc", "1", "--set", "data.dataset=https://someone:hunter2secret@127.0.0.1:9/x.jsonl")
    assert done.code != 0
    config = json.loads((done.run_dir / "config.json").read_text())
    assert config["values"]["data"]["dataset"] == "https://[redacted]@127.0.0.1:9/x.jsonl"
    written = "".join(p.read_text(errors="replace") for p in done.run_dir.rglob("*") if p.is_file())
    assert "hunter2secret" not in written


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("training.precision=fp8", "training.precision=fp8 does not run on CPU ranks; use bf16"),
        pytest.param(
            "training.optimizer_states=8bit",
            "training.optimizer_states=8bit needs torchao, which is not installed; "
            "pip install torchao, or set training.optimizer_states to bf16",
            marks=pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed"),
        ),
    ],
)
def test_what_every_rank_would_stop_at_starts_none(shell: Shell, setting: str, words: str) -> None:
    done = shell.train("--nproc", "1", "--set", "system.device=cpu", "--set", setting)
    assert done.code == 2 and words in done.err and "Traceback" not in done.err
    assert not done.run_dir.exists(), "no run was begun"
