"""Evidence taken from outside must not grow with the length of a run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from model_check.diagnose.reading import Reader
from model_check.record import RunDir
from model_check.record.journal import Journal
from model_check.supervise import collect


def test_only_the_newest_stacks_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_KEPT_FILES", 3)
    run_dir = RunDir.create(tmp_path / "run")
    gatherer, reader = collect.Gatherer(run_dir, Journal(run_dir)), Reader(run_dir)
    run_dir.events(0).touch()
    taken: list[float] = []
    rank = subprocess.Popen(["sleep", "100"])
    try:
        for number in range(1, 7):
            gatherer.stacks({0: rank.pid})
            seen = [dump.t for dump in reader.read(live=True).ranks[0].stacks]
            assert len(seen) == min(number, 3) and seen[:-1] == taken[-2:] and seen == sorted(seen)
            taken.append(seen[-1])
    finally:
        gatherer.close()
        rank.kill()
        rank.wait()
    assert sorted(path.name for path in run_dir.stacks_dir.iterdir()) == [f"rank-00000.{n}.json" for n in (4, 5, 6)]
