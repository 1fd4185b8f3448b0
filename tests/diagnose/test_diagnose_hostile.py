"""A run directory may come from anywhere: whatever lies in it, an examination ends, and says what it could not read."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from model_check.diagnose import examine, render
from model_check.diagnose.reading import JsonlTail, load
from model_check.record import RunDir, read_json
from model_check.record.ring import HEADER_BYTES, read_header, read_ring

FILES = (
    "events/supervisor.jsonl",
    "events/rank-00000.jsonl",
    "blackbox/rank-00000.ring",
    "stacks/rank-00000.1.json",
    "stacks/rank-00000.fault.txt",
    "flight/rank-00000.1.json",
    "environment.json",
    "verdict.json",
)

pytestmark = pytest.mark.timeout(180)


def plant(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[" * 200_000)  # deeper than any parser goes


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "endless", "deep"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, name, kind):
    plant(tmp_path / name, kind)
    verdict = examine(RunDir.open(tmp_path), live=False)
    assert (verdict.outcome, verdict.exit_code, verdict.findings) == ("interrupted", None, [])
    assert render(verdict)


def test_a_pipe_among_the_events_is_named_and_the_rest_is_read(stage):
    a, b = stage.ranks(2)
    stage.train(3)
    b.fails("ValueError", "boom", 33)
    b.exits(1)
    a.exits(1)
    os.mkfifo(stage.run_dir.events(7))
    assert any("rank-00007.jsonl: cannot be read" in said for said in load(stage.run_dir).damage)
    assert stage.first(live=False).code == "MC301"


def test_a_line_without_an_end_is_left_out_and_the_next_one_is_read(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "a"}\n{"x": "' + b"y" * (40 << 20) + b'"}\n{"event": "b"}\n')
    tail = JsonlTail(path)
    assert tail.update() == ["events.jsonl: 1 lines are not JSON"]
    assert [event.name for event in tail.events] == ["a", "b"]


@pytest.mark.parametrize("name", ["rank-99999999999999999999999.jsonl", "rank-999999999.jsonl"])
def test_a_rank_number_that_no_job_has_makes_no_ranks(tmp_path, name):
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / name).write_text('{"event": "exit", "code": 0}\n')
    assert load(RunDir.open(tmp_path)).all_ranks == []


def test_a_world_size_that_no_job_has_is_not_believed(tmp_path):
    (tmp_path / "events").mkdir()
    line = {"event": "job_started", "t": 1.0, "nproc": 10**15}
    (tmp_path / "events/supervisor.jsonl").write_text(json.dumps(line) + "\n")
    assert examine(RunDir.open(tmp_path), live=False).world_size == 0


def test_headers_and_json_of_pipes_are_empty(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert not read_header(tmp_path / "pipe") and read_json(tmp_path / "pipe") is None
    assert read_ring(tmp_path / "pipe").crumbs == []


# Drawn from a list: a recursive strategy for each of the fields takes a hundred times longer to draw than to test.
ODD = (
    *(None, True, False, 0, 1, -1, 7, 10**30, 0.5, -1e308, float("inf"), float("nan"), "", "0", "rank 1", "\x1b[31m"),
    *([], [[]], [None], [0], ["x"], [{}], [{"file": 3, "line": "y"}], [{"file": "/dev/zero", "line": 1}]),
    *({}, {"x": []}, {"file": None}, {"file": "t.py", "line": -5, "function": []}, {"type": "KeyError", "frames": 3}),
    *({"code": "MC999", "title": "t", "ranks": [0]}, [{"code": "MC204", "title": "t", "ranks": None}]),
)
VALUE = st.sampled_from(ODD)
# The names that rules look for, with values that they do not expect.
EVENTS = (
    *("exception", "raised", "swallowed_exception", "thread_exception", "exit", "group", "versions", "memory"),
    *("job_started", "job_ended", "rank_started", "rank_exited", "signal_sent", "stopped", "stall", "oom", "sample"),
)
FIELDS = (
    *("t", "rank", "pid", "code", "signal", "type", "message", "frames", "user_frame", "origin", "thread", "ranks"),
    *("nproc", "outcome", "exit_code", "why", "t_raised", "where", "name", "arguments", "via", "rss"),
)
RECORD = st.builds(
    lambda event, fields: {**fields, "event": event},
    st.sampled_from(EVENTS),
    st.dictionaries(st.sampled_from(FIELDS), VALUE, max_size=8),
)


@settings(deadline=None, max_examples=100, phases=(Phase.explicit, Phase.generate))
@given(st.lists(RECORD, max_size=5), st.lists(RECORD, max_size=5), VALUE, st.binary(max_size=200))
def test_records_of_any_content_are_examined(supervisor, own, verdict, ring):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("events", "blackbox", "stacks", "flight"):
            (root / name).mkdir()
        (root / "events/supervisor.jsonl").write_text("".join(json.dumps(r) + "\n" for r in supervisor))
        (root / "events/rank-00000.jsonl").write_text("".join(json.dumps(r) + "\n" for r in own))
        (root / "blackbox/rank-00000.ring").write_bytes(ring.ljust(HEADER_BYTES, b"\0"))
        (root / "verdict.json").write_text(json.dumps({"findings": verdict, "outcome": verdict, "exit_code": verdict}))
        (root / "stacks/rank-00000.1.json").write_text(json.dumps({"rank": 0, "threads": verdict, "t": verdict}))
        judged = examine(RunDir.open(root), live=False)
    assert judged.outcome in ("running", "completed", "failed", "interrupted")
    assert render(judged)
