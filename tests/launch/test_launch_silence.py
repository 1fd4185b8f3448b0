"""A stalled or closed standard error changes nothing for the job; neither does a rule that fails."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model_check.diagnose.examine import _Rules
from model_check.record import Finding, Verdict, read_json

_FAILS = "import sys; print('it ran'); sys.exit(3)"


def _run(tmp_path: Path, stderr: Any) -> subprocess.CompletedProcess[bytes]:
    script = tmp_path / "train.py"
    script.write_text(_FAILS)
    command = [str(Path(sys.executable).with_name("model-check")), "run", "--run-dir", "run", "train.py"]
    return subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, timeout=60, check=False)


@pytest.mark.parametrize("reader", ["gone", pytest.param("stalled", marks=pytest.mark.slow)])
def test_a_reader_that_is_gone_or_stalled_changes_nothing(tmp_path: Path, reader: str) -> None:
    read, write = os.pipe()
    if reader == "gone":
        os.close(read)
    else:
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        os.write(write, b"x" * 4096)
    done = _run(tmp_path, write)
    assert (done.returncode, done.stdout.count(b"it ran")) == (3, 1)
    verdict = read_json(tmp_path / "run" / "verdict.json")
    assert (verdict["outcome"], verdict["exit_code"]) == ("failed", 3)


@pytest.mark.parametrize("form", [(), ("--", sys.executable)], ids=["script", "command"])
def test_closed_streams_change_nothing(tmp_path: Path, form: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text("open('it ran', 'w'); raise SystemExit(3)")
    command = [str(Path(sys.executable).with_name("model-check")), "run", "--run-dir", "run", *form, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, preexec_fn=lambda: os.closerange(0, 3), timeout=60, check=False)
    assert done.returncode == 3 and (tmp_path / "it ran").exists()
    verdict = read_json(tmp_path / "run" / "verdict.json")
    assert verdict["exit_code"] == 3


@pytest.mark.parametrize("form", [(), ("--", sys.executable)], ids=["script", "command"])
def test_events_that_cannot_be_read_change_nothing(tmp_path: Path, form: tuple[str, ...]) -> None:
    """As on a file server that is gone when the job ends."""
    (tmp_path / "train.py").write_text(
        "import pathlib\n"
        "events = pathlib.Path('run/events/rank-00000.jsonl')\n"
        "events.unlink(missing_ok=True)\n"
        "events.mkdir(parents=True)\n"
    )
    command = [str(Path(sys.executable).with_name("model-check")), "run", "--run-dir", "run", *form, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    verdict = read_json(tmp_path / "run" / "verdict.json")
    assert (verdict["outcome"], verdict["exit_code"]) == ("completed", 0)


def test_a_rule_that_fails_is_a_note_and_the_others_still_judge(tmp_path: Path) -> None:
    def fails(ranks: list[int]) -> list[Finding]:
        raise IndexError(f"no rank in {ranks}")

    rules = _Rules()
    found = [Finding("MC301", "rank 0 raised ValueError")]
    assert rules.ask(fails, []) == [] and rules.ask(lambda: found) == found
    (note,) = rules.notes
    assert note.startswith("the rule fails failed at test_launch_silence.py:") and "no rank in []" in note
    Verdict(notes=rules.notes).write(tmp_path / "verdict.json")
    assert read_json(tmp_path / "verdict.json")["notes"] == [note]
