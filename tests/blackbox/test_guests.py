"""Unchanged scripts under torchrun and under `model-check run`: the same results, files, exit codes and graphs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "guest.py"
LIBRARY = {"guestbook", "loop", "model"}
NAMES = sorted({path.stem for path in (BENCHMARK.parent / "guests").glob("*.py")} - LIBRARY)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_the_guest_notices_nothing(name: str) -> None:
    command = [sys.executable, str(BENCHMARK), "--short", "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    if "skipped:" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
