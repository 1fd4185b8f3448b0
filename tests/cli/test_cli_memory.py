"""What `train` says about memory while it starts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

MARKS = ["START", "POST-IMPORT", "POST-MODEL", "FIRST-STEP"]
LINE = re.compile(r"^\[CPU(\d)\] MEM:([A-Z-]+) RSS ([\d.]+) GiB", re.MULTILINE)


@pytest.mark.slow
def test_every_rank_marks_its_memory_in_the_log_and_in_its_events(shell: Any) -> None:
    done = shell.train("--max-steps", "2", "--nproc", "2")
    assert done.code == 0, done.err
    said = [(rank, mark) for rank, mark, _ in LINE.findall(done.out)]
    for rank in range(2):
        assert [mark for number, mark in said if number == str(rank)] == MARKS
        rows = (done.run_dir / "events" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
        events = [event for event in map(json.loads, rows) if event.get("event") == "memory" and "mark" in event]
        assert [event["mark"] for event in events] == MARKS
        assert all(event["rss"] > 50 << 20 and "allocated" not in event for event in events)
        assert events[-1]["step"] >= 1 > events[0]["step"], "the last mark follows the first step"
    assert not (done.run_dir / "plan.json").exists(), "there is no GPU to plan for"
