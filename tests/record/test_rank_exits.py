"""How a rank ended: the launcher's record of it, as the rules read it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from model_check.record import RunDir, read_jsonl
from model_check.record.events import read_events
from model_check.record.events.job import RankExit
from model_check.record.events.process import Stopped
from model_check.record.journal import Journal


@pytest.mark.parametrize(("code", "signal"), [(0, None), (3, None), (None, 9), (None, None)])
def test_an_exit_is_read_as_it_was_written(tmp_path: Path, code: int | None, signal: int | None) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    exit = RankExit(t=3.5, rank=4, pid=17, code=code, signal=signal, attempt=2)
    journal = Journal(run_dir)
    journal.write(exit)
    journal.close()
    (record,) = read_jsonl(run_dir.supervisor_events).records
    assert (record["event"], record["code"], record["signal"]) == ("rank_exited", code, signal), "null where unknown"
    (read,) = read_events(run_dir.supervisor_events)
    assert read.time is not None and replace(read, time=None) == exit


@pytest.mark.parametrize(
    ("why", "reason"),
    [("hang: no progress for 300 s", "hang"), ("proven: MC201: …", "proven"), ("stopped by SIGTERM", "interrupted")],
)
def test_a_version_that_gave_no_reason_began_its_sentence_with_it(why: str, reason: str) -> None:
    assert Stopped(why=why).because == reason
