"""A run directory that an earlier version wrote still gives its verdict.

The runs are the fault scripts order_mismatch, exception_ddp and log_of_zero under version 0.1.0 (commit 7c29424) and
torch 2.13 on the CPU, without the quick looks between two rounds of stacks.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from model_check.diagnose import examine
from model_check.record import RunDir, Verdict

RUNS = Path(__file__).with_name("earlier_runs")


@pytest.mark.parametrize(
    ("name", "code", "guilty", "victims", "step", "location"),
    [
        ("hang", "MC201", [1], [0], 12, "train.py:22"),
        ("crash", "MC301", [1], [0], 12, "train.py:14"),
        ("nan", "MC401", [1], [0], 17, "train.py:17"),
    ],
)
def test_the_same_verdict(
    tmp_path: Path, name: str, code: str, guilty: list[int], victims: list[int], step: int, location: str
) -> None:
    with tarfile.open(RUNS / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    run_dir = RunDir.open(tmp_path / name)
    written = Verdict.read(run_dir.verdict)
    run_dir.verdict.unlink()
    verdict = examine(run_dir, live=False)
    (finding,) = verdict.findings
    assert (finding.code, finding.ranks, finding.victims) == (code, guilty, victims)
    assert (finding.step, finding.location) == (step, location)
    assert written is not None and [finding.severity] == [f.severity for f in written.findings]
    assert (verdict.outcome, verdict.exit_code) == (written.outcome, written.exit_code)
    assert (verdict.steps_completed, verdict.notes) == (written.steps_completed, [])
