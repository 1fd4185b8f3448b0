"""How a rank ended: the launcher's record of it, as the rules read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_check.record import RunDir, read_jsonl
from model_check.record.journal import Journal
from model_check.record.rank_exits import RANK_EXITED, RankExit


@pytest.mark.parametrize(("code", "signal"), [(0, None), (3, None), (None, 9), (None, None)])
def test_an_exit_is_read_as_it_was_written(tmp_path: Path, code: int | None, signal: int | None) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    exit = RankExit(4, 17, code, signal, 3.5, attempt=2)
    journal = Journal(run_dir)
    exit.write(journal)
    journal.close()
    (record,) = read_jsonl(run_dir.supervisor_events).records
    assert record["event"] == RANK_EXITED and RankExit.from_json(record) == exit


def test_a_negative_code_is_a_signal() -> None:
    assert RankExit.from_json({"rank": 1, "pid": 7, "code": -11, "t": 1.0}).signal == 11
