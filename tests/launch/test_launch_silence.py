"""A stalled or closed stream changes nothing for the job; neither does a rule that fails."""

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
from tests.conftest import TINY

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


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["gone", "stalled"])
@pytest.mark.parametrize("verb", ["run", "train"])
def test_the_reader_of_standard_output_changes_nothing(tmp_path: Path, verb: str, reader: str) -> None:
    """As `| head` does, or a pager that nobody scrolls: the job ends with its own exit code."""
    (tmp_path / "train.py").write_text("for n in range(2000): print(n, 'x' * 80)\nraise SystemExit(3)")
    debug = ["--debug", "--nproc", "1", "--max-steps", "2"]
    sets = [word for value in (*TINY, "checkpoint.interval=0", "system.device=cpu") for word in ("--set", value)]
    words = ["train.py"] if verb == "run" else [*debug, *sets]
    read, write = os.pipe()
    if reader == "gone":
        os.close(read)
    else:
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
        os.write(write, b"x" * 4096)
    command = [str(Path(sys.executable).with_name("model-check")), verb, "--run-dir", "run", *words]
    # An unbuffered stream has no lock that its writer could hold.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, stdout=write, stderr=subprocess.PIPE, timeout=120, check=False
    )
    assert done.returncode == (3 if verb == "run" else 0), done.stderr
    verdict = read_json(tmp_path / "run" / "verdict.json")
    assert verdict["outcome"] == ("failed" if verb == "run" else "completed")


@pytest.mark.parametrize("form", [(), ("--", sys.executable)], ids=["script", "command"])
def test_closed_streams_change_nothing(tmp_path: Path, form: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text("open('it ran', 'w'); raise SystemExit(3)")
    command = [str(Path(sys.executable).with_name("model-check")), "run", "--run-dir", "run", *form, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, preexec_fn=lambda: os.closerange(0, 3), timeout=60, check=False)
    assert done.returncode == 3 and (tmp_path / "it ran").exists()
    verdict = read_json(tmp_path / "run" / "verdict.json")
    assert verdict["exit_code"] == 3


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("form", [(), ("--", sys.executable)], ids=["script", "command"])
def test_events_that_cannot_be_read_change_nothing(tmp_path: Path, form: tuple[str, ...], code: int) -> None:
    """As on a file server that is gone when the job ends."""
    (tmp_path / "train.py").write_text(
        "import pathlib\n"
        "events = pathlib.Path('run/events/rank-00000.jsonl')\n"
        "events.unlink(missing_ok=True)\n"
        "events.mkdir(parents=True)\n"
        f"raise SystemExit({code})\n"
    )
    command = [str(Path(sys.executable).with_name("model-check")), "run", "--run-dir", "run", *form, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr
    verdict = read_json(tmp_path / "run" / "verdict.json")
    assert (verdict["outcome"], verdict["exit_code"]) == ("failed" if code else "completed", code)


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
