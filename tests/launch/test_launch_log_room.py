"""A rank's log never makes `print` raise and never fills a disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_check.launch.log_files import RESERVED, LogRoom
from model_check.record import Verdict
from tests.conftest import ROOT

SCRIPT = """
import os, sys, time
print("started", flush=True)
while os.fstat(1).st_blocks * 512 < 4 << 20:  # until the launcher has reserved room
    time.sleep(0.01)
with open("/tmp/fill", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
for number in range(2000):
    print("line", number, "x" * 100)
os.write(1, b"written past the interpreter\\n")
if os.system("echo from a child"):
    sys.exit("the child could not write")
for number in range(100_000):
    print("more", "x" * 100)
print("the end")
"""


@pytest.fixture
def outside_tmp() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="log-room-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


def run_with_small_tmp(folder: Path, script: str, before: str = "true") -> subprocess.CompletedProcess[str]:
    """Runs the script with a /tmp of 24 MiB of its own, after the shell command `before`."""
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a /tmp of our own")
    (folder / "script.py").write_text(script)
    run = f"{sys.executable} -m model_check run --run-dir run script.py"
    return subprocess.run(
        ["unshare", "-m", "bash", "-c", f"mount -t tmpfs -o size=24m tmpfs /tmp; {before}; exec {run}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_script_prints_on_where_tmp_fills_up(outside_tmp: Path) -> None:
    done = run_with_small_tmp(outside_tmp, SCRIPT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("] line ") == 2000 and "from a child" in done.stdout and "written past" in done.stdout
    verdict = Verdict.read(outside_tmp / "run" / "verdict.json")
    assert verdict is not None and (verdict.outcome, verdict.findings) == ("completed", [])
    assert any("the disk of the logs" in note and "No space left on device" in note for note in verdict.notes)


def test_a_script_starts_and_prints_where_tmp_is_full(outside_tmp: Path) -> None:
    script = "for number in range(2000):\n    print('line', number, 'x' * 100)\n"
    done = run_with_small_tmp(outside_tmp, script, before="cat /dev/zero > /tmp/fill 2> /dev/null")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("] line ") == 2000
    assert (outside_tmp / "run" / "logs" / "rank-00000.log").read_text().count("line") == 2000


def test_a_long_log_keeps_its_first_and_its_newest_part(tmp_path: Path) -> None:
    log = tmp_path / "rank-00000.log"
    log.touch()
    room = LogRoom(kept_first=64 << 10, kept_newest=128 << 10)
    lines = [f"{number:07d} {'x' * 91}\n" for number in range(40_000)]
    with log.open("a") as file:
        for number, line in enumerate(lines):
            file.write(line)
            if number % 500 == 0:
                file.flush()
                assert room.look([log]) is None
        file.flush()
    assert log.stat().st_blocks * 512 < RESERVED + (1 << 20)
    room.look([log])
    room.close()
    text = log.read_bytes()
    assert len(text) == 100 * len(lines)  # nothing moves: a reader at an offset can continue
    assert text.startswith("".join(lines[:640]).encode()) and text.endswith("".join(lines[-1200:]).encode())
    assert log.stat().st_blocks * 512 < 1 << 20


def test_a_log_that_is_not_there_yet_is_nobodys_trouble(tmp_path: Path) -> None:
    assert LogRoom().look([tmp_path / "rank-00000.log"]) is None
