"""A run directory looked at from outside: goes its launcher on, or has it ended without a word."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from model_check.cli.main import main
from model_check.record import RunDir
from model_check.supervise.run_liveness import watch_of

# In the interpreter's own words, so that the ranks need no torch and start at once.
_RANK = "import time\nprint('up', flush=True)\ntime.sleep(100)\n"


# On the clock that records have. A launcher that signed before this process began had its pid before us.
_STARTED = psutil.Process().create_time() - time.time() + time.monotonic()


def _signed(folder: Path, *more: dict[str, Any], **launcher: Any) -> RunDir:
    run_dir = RunDir.create(folder)
    signed = {"event": "job_started", "t": time.monotonic(), "time": time.time(), "nproc": 1} | launcher
    run_dir.supervisor_events.write_text("".join(json.dumps(record) + "\n" for record in (signed, *more)))
    return run_dir


def test_a_living_launcher_watches_until_it_writes_the_end(tmp_path: Path) -> None:
    watch = watch_of(_signed(tmp_path / "alive", launcher_pid=os.getpid()))
    assert watch is not None and watch.alive
    end = {"event": "job_ended", "t": time.monotonic(), "time": 1234.0, "outcome": "completed", "exit_code": 0}
    watch = watch_of(_signed(tmp_path / "ended", end, launcher_pid=os.getpid()))
    assert watch is not None and (watch.alive, watch.last_time) == (False, 1234.0)
    assert watch_of(RunDir.create(tmp_path / "empty")) is None


@pytest.mark.parametrize(
    "launcher",
    [
        {"launcher_pid": 2**22 - 1},
        {"t": _STARTED - 10, "time": time.time() - time.monotonic() + _STARTED - 10, "launcher_pid": os.getpid()},
        {"time": time.time() - 3600.0, "launcher_pid": os.getpid()},  # another boot, or another machine
        {"launcher_pid": "1"},
        {"t": 1e300, "time": None, "launcher_pid": os.getpid()},
        {},
    ],
)
def test_a_pid_alone_proves_nothing(tmp_path: Path, launcher: dict[str, Any]) -> None:
    watch = watch_of(_signed(tmp_path / "run", **launcher))
    assert watch is not None and not watch.alive


def _diagnose(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as done:
        main(["diagnose", str(run)])
    assert done.value.code == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_diagnose_of_a_run_that_goes_on_and_of_one_whose_launcher_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank.py").write_text(_RANK)
    command = [sys.executable, "-m", "model_check", "run", "--run-dir", "run", "rank.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline().endswith(b"] up\n")
        assert _diagnose(tmp_path / "run", capsys) == "running: 1 rank: nothing to report\n"
        launcher.kill()
    shown = _diagnose(tmp_path / "run", capsys)
    assert shown.startswith("interrupted: 1 rank: nothing to report\nthe launcher ended without a word")
    assert re.search(r"its last record is of 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d$", shown.strip())
