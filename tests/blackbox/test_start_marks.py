"""The twelve checkpoints of a start: the lines, the events, and the sentence that says who is where."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_check.blackbox.box import BOX
from model_check.blackbox.start_marks import StartMarks
from model_check.record import JsonlWriter, RunDir, read_jsonl
from model_check.record.events import read_event
from model_check.record.events.process import StartMark
from model_check.record.start_marks import (
    CHECKPOINTS,
    component_of,
    last_passed,
    read_start_marks,
    start_table,
    who_is_where,
)

MARK = StartMark.kind
LINE = re.compile(
    r"\[(\d\d):(\d\d):(\d\d)\.(\d{3})\]\[\+(\d+\.\d{3})s\]\[R(\d+)/(\d+)\]\[LR(\d+)\]\[PID:(\d+)\] (.*)", re.DOTALL
)


def at(number: int, t: float = 100.0) -> StartMark:
    return StartMark(number=number, t=t)


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({}, None),
        ({0: at(11), 1: at(12)}, None),
        ({0: at(9), 1: at(8)}, "rank 0 passed 9, rank 1 is still before 9 (metrics writer), 34 s"),
        ({0: at(8), 1: at(8)}, "ranks 0, 1 are still before 9 (metrics writer), 34 s"),
        ({0: at(12), 1: at(4)}, "rank 0 passed 12, rank 1 is still before 5 (process group, model), 34 s"),
        (
            {0: at(9), 1: at(8, 110.0), 2: at(2), 3: at(8, 120.0)},
            "rank 0 passed 9, ranks 1, 3 are still before 9 (metrics writer), 14 s, "
            "rank 2 is still before 3 (import of torch, run directory), 34 s",
        ),
        (
            {0: at(11), **{rank: at(10) for rank in range(1, 9)}},
            "rank 0 passed 11, ranks 1, 2, 3, 4, 5, 6 and 2 more are still before 11 (first step), 34 s",
        ),
    ],
)
def test_the_sentence(marks: dict[int, StartMark], expected: str | None) -> None:
    assert who_is_where(marks, now=134.0) == expected


def test_evidence_names_a_component_of_ours_for_each_of_the_twelve() -> None:
    assert len(CHECKPOINTS) == 12
    components = [component_of(number) for number in range(1, 13)]
    assert len(set(components)) == 12
    assert not re.search("Wandb|Accelerator|Callback|LLMModule|DataModule|Trainer", " ".join(components))


_JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["event", "number", "t", "name"]), _JSON | st.just(MARK)), max_size=4))
def test_records_that_make_no_sense_are_left_out(records: list[dict[str, object]]) -> None:
    passed = last_passed(map(read_event, records))
    assert passed is None or 1 <= passed.number <= 12


def test_a_restarted_rank_begins_again() -> None:
    records = [{"event": MARK, "number": n, "t": float(t)} for t, n in enumerate([1, 2, 3, 4, 1, 2])]
    assert last_passed(map(read_event, records)) == StartMark(number=2, t=5.0)


def test_the_table_of_a_dead_run(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    for rank, numbers in ((0, range(1, 10)), (1, range(1, 9))):
        writer = JsonlWriter(run_dir.events(rank))
        for number in numbers:
            off = {"off": "logging.wandb is false"} if number == 9 else {}
            writer.write({"event": MARK, "number": number, "name": CHECKPOINTS[number - 1], "t": 50.0 + number, **off})
        writer.close()
    writer = JsonlWriter(run_dir.supervisor_events)
    writer.write({"event": "rank_exited", "t": 92.0, "rank": 0})
    writer.close()
    assert start_table(run_dir) == [
        "start: rank 0 passed 9, rank 1 is still before 9 (metrics writer), 34 s",
        "  rank 0: CHECKPOINT 9: WandbLogger ready (off: logging.wandb is false)",
        "  rank 1: CHECKPOINT 8: Accelerator configured",
    ]


@pytest.fixture
def box(tmp_path: Path) -> RunDir:
    BOX.run_dir = RunDir.create(tmp_path / "run")
    yield BOX.run_dir
    BOX.leave()
    BOX.run_dir = None
    os.environ.pop("MODEL_CHECK_RANK_PID", None)


def test_marks_from_before_the_box_are_written_with_the_first_one_after(box: RunDir) -> None:
    marks, said = StartMarks(), []
    marks.begin(3, 8, 1, said.append)
    marks.passed(1)
    marks.passed(2)
    BOX.open(3, world_size=8)
    marks.passed(3)
    marks.passed(2)  # a second caller of the same checkpoint
    written = [(r["number"], r["name"]) for r in read_jsonl(box.events(3)).records if r["event"] == MARK]
    assert written == list(enumerate(CHECKPOINTS, start=1))[:3]
    assert read_start_marks(box)[3].number == 3
    parsed = [LINE.fullmatch(line) for line in said]
    assert all(parsed), said
    assert [match[10] for match in parsed if match] == [f"CHECKPOINT {n}: {name}" for n, name in written]
    assert {match.group(6, 7, 8, 9) for match in parsed if match} == {("3", "8", "1", str(os.getpid()))}


def test_a_mark_of_something_that_is_off_says_so(box: RunDir) -> None:
    marks, said = StartMarks(), []
    marks.begin(0, 1, 0, said.append)
    BOX.open(0, world_size=1)
    marks.passed(1, off="logging.wandb is false")
    assert [line.rpartition("] ")[2] for line in said] == [
        "CHECKPOINT 1 comes next and is off: logging.wandb is false",
        "CHECKPOINT 1: Script started",
    ]
    assert read_start_marks(box)[0].off == "logging.wandb is false"


def test_a_checkpoint_out_of_order_is_our_own_fault() -> None:
    marks = StartMarks()
    marks.begin(0, 1, 0)
    with pytest.raises(AssertionError, match="checkpoint 5 follows 0"):
        marks.passed(5)


def test_a_process_that_is_no_rank_of_ours_marks_nothing(box: RunDir) -> None:
    BOX.open(0)
    StartMarks().passed(1)
    marks, said = StartMarks(), []
    marks.begin(0, 1, 0, said.append)
    if (child := os.fork()) == 0:
        marks.passed(1)
        os._exit(len(said))
    assert os.waitpid(child, 0)[1] == 0, "a child of a rank is not the rank"
    assert MARK not in [record["event"] for record in read_jsonl(box.events(0)).records]
    marks.passed(1)
    assert read_start_marks(box)[0].number == 1 and len(said) == 1


def test_what_blocks_is_announced_and_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrst")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    marks, said = StartMarks(), []
    marks.begin(0, 2, 0, said.append)
    with marks.calling("WandbLogger constructor"):
        assert said[-1].endswith("About to call WandbLogger constructor...")
    assert re.search(r"WandbLogger constructor returned after \d+\.\d{3} s$", said[-1])
    marks.say_environment()
    text = "\n".join(said)
    assert "HF_TOKEN=[redacted]" in text and "NCCL_DEBUG=INFO" in text and "abcdefgh" not in text


def test_one_process_at_a_time_and_a_killed_one_lets_the_next_in(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom model_check.record.host_lock import in_turn\n"
        "print('up', flush=True)\n"
        "with in_turn(Path(sys.argv[1])):\n    print('mine', flush=True)\n    sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "new" / "turn.lock")]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start() as first, start() as second:
        assert first.stdout is not None and second.stdout is not None
        assert first.stdout.readline() + second.stdout.readline() == "up\nup\n"
        holder, waiter = (first, second) if _holds_a_lock(first.pid, tmp_path) else (second, first)
        holder.kill()
        assert waiter.stdout is not None and waiter.stdout.readline() == "mine\n"
        waiter.kill()


def _holds_a_lock(pid: int, folder: Path) -> bool:
    """By the kernel's own list; waits until one of the two has it."""
    inode = (folder / "new" / "turn.lock").stat
    while True:
        try:
            wanted = f":{inode().st_ino}"
        except FileNotFoundError:
            continue
        holders = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
        held_by = [int(fields[4]) for fields in holders if fields[5].endswith(wanted)]
        if held_by:
            return held_by[0] == pid


def test_events_are_plain_json(box: RunDir) -> None:
    BOX.open(0)
    marks = StartMarks()
    marks.begin(0, 1, 0)
    marks.passed(1)
    (line,) = [line for line in box.events(0).read_text().splitlines() if MARK in line]
    record = json.loads(line)
    assert (record["event"], record["number"], record["name"]) == ("checkpoint_mark", 1, "Script started")
