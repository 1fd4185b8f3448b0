"""A look at ranks that record themselves: who lives, who is gone, and no stacks of a job that moves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from model_check.blackbox.recorder import Recorder
from model_check.diagnose.reading import Reader
from model_check.record import RunDir, read_jsonl
from model_check.supervise.unwatched import look_at_ranks

WRITES_A_RING = """
import sys
from pathlib import Path
from model_check.blackbox.recorder import Recorder
Recorder(Path(sys.argv[1]), rank=1)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    directory = RunDir.create(tmp_path / "run")
    subprocess.run([sys.executable, "-c", WRITES_A_RING, str(directory.ring(1))], check=True)
    return directory


def test_a_rank_whose_process_is_gone_is_written_down_once(run_dir: RunDir) -> None:
    Recorder(run_dir.ring(0), rank=0).put(1, 0, 0, 0, 0)
    assert look_at_ranks(run_dir)
    assert look_at_ranks(run_dir)
    records = read_jsonl(run_dir.supervisor_events).records
    assert [(r["event"], r["rank"], r["code"], r["signal"]) for r in records] == [("rank_exited", 1, None, None)]
    assert not run_dir.stacks_dir.exists()


def test_a_rank_that_was_started_again_is_not_gone(run_dir: RunDir) -> None:
    first = Recorder(run_dir.ring(0), rank=0)
    assert look_at_ranks(run_dir)
    assert Reader(run_dir).read(live=True).of(1).exit is not None
    Recorder(run_dir.ring(1), rank=1).put(1, 0, 0, 0, 0)
    assert Reader(run_dir).read(live=True).of(1).exit is None
    first.close()


def test_a_directory_that_cannot_be_written_can_be_looked_at(run_dir: RunDir) -> None:
    alive = Recorder(run_dir.ring(0), rank=0)
    run_dir.supervisor_events.mkdir(parents=True)  # root may write what others may only read
    assert look_at_ranks(run_dir)
    alive.close()


def test_nothing_is_written_where_no_rank_lives(run_dir: RunDir) -> None:
    assert not look_at_ranks(run_dir)
    assert not run_dir.supervisor_events.exists()
