"""SIGKILL at random moments, also inside saves: nothing that was committed is lost, no loss differs in a bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kills", [pytest.param(15, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.long)])
def test_kills_lose_nothing_and_change_nothing(tmp_path: Path, kills: int) -> None:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "crash_torture.py", "--kills", str(kills), "--json", result],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    table = json.loads(result.read_text())
    assert table["kills"] == kills and table["kills_that_left_a_save_half_written"] >= kills // 15
    assert (table["checkpoints_lost"], table["checkpoints_damaged"], table["losses_wrong"]) == (0, 0, 0)
    assert table["steps_missing"] == 0 and table["final_loss"] == table["final_loss_undisturbed"]
