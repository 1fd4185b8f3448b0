"""The ring's format: what is written is what is read, whatever happens to the file or its writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_check.blackbox.recorder import Recorder
from model_check.record import ring
from model_check.record.ring import RingTail, open_spans, read_header, read_ring

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
words = st.text(max_size=40)
calls = st.fixed_dictionaries(
    {
        "phase": st.sampled_from(ring.PHASES),
        "op": st.sampled_from(ring.OPS),
        "dtype": st.sampled_from(ring.DTYPES),
        "group": words,
        "collective_seq": st.integers(0, 2**32 - 1),
        "shape": st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
        "nbytes": st.integers(0, 2**64 - 1),
        "flags": st.integers(0, 2**16 - 1),
        "file": words,
        "line": st.integers(0, 2**32 - 1),
        "function": words,
        "detail": words,
        "peer": st.integers(-1, 2**31 - 1),
    }
)


def written_text(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8", "replace")


@quick
@given(written=st.lists(calls, max_size=20), capacity=st.integers(1, 12))
def test_what_is_written_is_read_and_the_oldest_is_overwritten(
    tmp_path: Path, written: list[dict], capacity: int
) -> None:
    recorder = Recorder(tmp_path / "r.ring", rank=3, capacity=capacity)
    for number, call in enumerate(written):
        recorder.steps = number
        assert recorder.begin(**call) == number + 1
    reading = read_ring(tmp_path / "r.ring")
    kept = written[-capacity:]
    assert [c.seq for c in reading.crumbs] == list(range(len(written) - len(kept) + 1, len(written) + 1))
    for crumb, call in zip(reading.crumbs, kept, strict=True):
        for name, value in call.items():
            got = getattr(crumb, "bytes" if name == "nbytes" else name)
            assert got == (written_text(value) if isinstance(value, str) else value), name
        assert crumb.step == crumb.seq - 1
        assert crumb.thread == threading.get_native_id()
        assert crumb.event == "begin"


@quick
@given(batches=st.lists(st.integers(0, 15), max_size=12), capacity=st.integers(2, 8))
def test_a_tail_returns_every_record_once_and_counts_the_lost(
    tmp_path: Path, batches: list[int], capacity: int
) -> None:
    path = tmp_path / "t.ring"
    path.unlink(missing_ok=True)
    recorder = Recorder(path, rank=0, capacity=capacity)
    tail = RingTail(path)
    seen: list[int] = []
    total = 0
    for size in batches:
        for _ in range(size):
            recorder.point("step", detail=f"number {total}")
            total += 1
        assert tail.last_seq() == total
        fresh = tail.poll()
        assert [c.seq for c in fresh] == list(range(total - min(size, capacity) + 1, total + 1))
        assert [c.detail for c in fresh] == [f"number {c.seq - 1}" for c in fresh]
        seen += [c.seq for c in fresh]
    assert len(seen) + tail.lost == total
    assert tail.poll() == []
    assert total == 0 or tail.stamp(total).seq == total


def test_a_tail_starts_over_when_the_rank_is_restarted(tmp_path: Path) -> None:
    path = tmp_path / "r.ring"
    tail = RingTail(path)
    assert tail.last_seq() == 0 and tail.poll() == [] and not tail.header
    first = Recorder(path, rank=0, attempt=0)
    first.point("step", detail="first")
    assert [c.detail for c in tail.poll()] == ["first"]
    assert first.is_current()
    second = Recorder(path, rank=0, attempt=1)
    second.point("step", detail="second")
    assert [c.detail for c in tail.poll()] == ["second"]
    assert tail.generation == 2 and tail.header.attempt == 1
    assert not first.is_current() and second.is_current()


@quick
@given(garbage=st.binary(max_size=5000), at=st.integers(0, 5000))
def test_garbage_is_no_ring(tmp_path: Path, garbage: bytes, at: int) -> None:
    path = tmp_path / "g.ring"
    path.write_bytes(garbage)
    reading = read_ring(path)
    assert not reading.header and reading.crumbs == []
    assert not read_header(path) and RingTail(path).poll() == []
    recorder = Recorder(path, rank=0, capacity=4)
    recorder.point("step", detail="kept")
    data = bytearray(path.read_bytes())
    data[at : at + len(garbage)] = garbage
    path.write_bytes(bytes(data))
    read_ring(path)
    RingTail(path).poll()


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "r.ring"
    recorder = Recorder(path, rank=0, capacity=8)
    for number in range(3):
        recorder.point("step", detail=str(number))
    data = bytearray(path.read_bytes())
    start = ring.HEADER_BYTES + ring.STRINGS_BYTES
    data[start + 2 * ring.RECORD.size - 8 : start + 2 * ring.RECORD.size] = bytes(8)
    path.write_bytes(bytes(data))
    reading = read_ring(path)
    assert [c.detail for c in reading.crumbs] == ["0", "2"]


def test_a_ring_that_was_cut_short_still_gives_its_first_records(tmp_path: Path) -> None:
    path = tmp_path / "r.ring"
    recorder = Recorder(path, rank=0, capacity=8)
    for number in range(5):
        recorder.point("step", detail=str(number))
    path.write_bytes(path.read_bytes()[: ring.HEADER_BYTES + ring.STRINGS_BYTES + 2 * ring.RECORD.size + 10])
    reading = read_ring(path)
    assert [c.detail for c in reading.crumbs] == ["0", "1"]


def test_a_full_string_table_and_a_long_command_line_do_not_stop_the_recorder(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.ring", rank=0, argv=["python"] + ["x" * 100] * 100)
    assert read_header(tmp_path / "r.ring").argv == ("python", "…")
    for number in range(ring.STRINGS_BYTES // 1000):
        recorder.point("step", detail=f"{number}" + "y" * 1100)
    recorder.point("step", detail="z" * 1100)
    assert read_ring(tmp_path / "r.ring").crumbs[-1].detail == ""


def test_open_spans_are_what_was_begun_and_not_ended(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.ring", rank=0)
    outer = recorder.begin("save")
    inner = recorder.begin("collective", op="barrier")
    recorder.end(inner, "collective", op="barrier")
    reading = read_ring(tmp_path / "r.ring")
    assert [c.seq for c in reading.open_spans()] == [outer]
    recorder.end(outer, "save")
    assert open_spans(read_ring(tmp_path / "r.ring").crumbs) == []


def test_records_of_many_threads_are_whole_and_in_order(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.ring", rank=0, capacity=4096)
    put, kind = recorder.put, ring.kind(ring.POINT, 4)

    def work() -> None:
        for number in range(500):
            put(kind, 0, number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reading = read_ring(tmp_path / "r.ring")
    assert [c.seq for c in reading.crumbs] == list(range(1, 2001))
    by_thread = {t: [c.line for c in reading.crumbs if c.thread == t] for t in {c.thread for c in reading.crumbs}}
    assert sorted(by_thread.values()) == [list(range(500))] * 4


def test_the_ring_survives_sigkill(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from model_check.blackbox.recorder import Recorder\n"
        "r = Recorder(Path(sys.argv[1]), rank=1)\n"
        "r.begin('collective', op='all_reduce', shape=(4, 8), file='train.py', line=21)\n"
        "print('in it', flush=True)\n"
        "while True:\n    r.point('step')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "r.ring")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "in it\n"
    tail = RingTail(tmp_path / "r.ring")
    deadline = time.monotonic() + 30
    while tail.last_seq() < 2000:
        assert time.monotonic() < deadline, "the writer did not get to 2000 records in 30 s"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    reading = read_ring(tmp_path / "r.ring")
    numbers = [c.seq for c in reading.crumbs]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


@pytest.mark.parametrize("size", [ring.CAPACITY])
def test_the_newest_record_is_found_without_reading_the_ring(tmp_path: Path, size: int) -> None:
    recorder = Recorder(tmp_path / "r.ring", rank=0)
    kind = ring.kind(ring.POINT, 4)
    for _ in range(3 * size + 17):
        recorder.put(kind)
    tail = RingTail(tmp_path / "r.ring")
    assert tail.last_seq() == 3 * size + 17
    assert len(tail.poll()) == size and tail.lost == 2 * size + 17
