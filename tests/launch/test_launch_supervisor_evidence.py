"""What is read from outside: /proc, exits, stacks, kernel kills, pulses. Real processes in known states."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_jobs import wait_until

from model_check.blackbox.recorder import Recorder
from model_check.record import RunDir
from model_check.record.cgroups import kill_count, memory_cgroups, memory_limit
from model_check.record.events.memory import MemoryKill
from model_check.record.ring import FLAG_ASYNC
from model_check.record.typed import to_json
from model_check.record.user_code import is_user_file
from model_check.supervise import processes, stacks
from model_check.supervise.memorykills import KernelLog, parse_kill
from model_check.supervise.process_exits import ExitWatcher, decode_wait_status
from model_check.supervise.waiting import Activity, activities, waiting_line
from model_check.supervise.watched_rank import Pulse


@pytest.fixture
def python() -> Iterator[Any]:
    """Starts Python code that prints one line when it is where it should be."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _until(condition: Any, deadline_s: float = 5.0) -> Any:
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, "it did not become true in time"
        time.sleep(0.01)
    return value


def test_a_process_that_waits_for_input_shows_the_read_and_its_descriptor(python: Any) -> None:
    process = python("print('here', flush=True); input()")
    sample = _until(lambda: (s := processes.sample(process.pid)) and s.syscall == "read" and s)
    assert (sample.syscall_fd, sample.state) == (0, "S")
    assert sample.syscall_target is not None and sample.syscall_target.startswith("pipe:")
    assert sample.fd0 == sample.syscall_target
    assert to_json(sample)["pid"] == process.pid


def test_a_stopped_process_is_in_state_t_and_its_stack_can_still_be_read(python: Any) -> None:
    process = python("import time\ndef napping():\n    print('here', flush=True); time.sleep(100)\nnapping()")
    os.kill(process.pid, signal.SIGSTOP)
    _until(lambda: processes.read_stat(process.pid).state == "T")
    taken = stacks.take(process.pid)
    assert taken.source == "py-spy" and taken.error is None
    assert "napping" in [frame.function for frame in taken.main.frames]


def test_the_stack_of_a_process_that_holds_the_gil_in_c_code(python: Any) -> None:
    process = python("import ctypes\ndef hold():\n    print('here', flush=True); ctypes.PyDLL(None).sleep(100)\nhold()")
    _until(lambda: processes.read_stat(process.pid).state == "S")
    thread = stacks.take(process.pid).main
    assert thread is not None and thread.gil
    assert thread.frames[0].function == "hold"


def test_children_and_descendants(python: Any) -> None:
    code = (
        "import subprocess, sys\n"
        'inner = \'import subprocess; p = subprocess.Popen(["sleep", "100"]); print("up", flush=True); p.wait()\'\n'
        "p = subprocess.Popen([sys.executable, '-c', inner], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print('here', flush=True); p.wait()"
    )
    process = python(code)
    (child,) = processes.children_of(process.pid)
    (grandchild,) = processes.children_of(child)
    assert processes.descendants_of(process.pid) == [child, grandchild]
    # A process has its new program a moment before it has the new program's command line.
    assert wait_until(lambda: processes.command_of(grandchild)) == ["sleep", "100"]
    assert [c.pid for c in processes.sample(process.pid).children] == [child]


def test_a_command_name_with_brackets_and_spaces_is_read_whole(tmp_path: Path) -> None:
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([str(odd), "100"]) as process:
        stat = _until(lambda: (s := processes.read_stat(process.pid)) and s.comm == "a) R 1 (b" and s)
        assert stat.ppid == os.getpid() and stat.alive
        process.kill()


def test_a_process_that_is_gone_reads_as_nothing() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert processes.sample(process.pid) is None
    assert not processes.is_alive(process.pid)
    assert processes.children_of(process.pid) == []
    assert processes.environment_of(process.pid) == {}
    assert stacks.take(process.pid).threads == ()


def test_who_holds_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        holder = processes.port_holder(port)
        assert holder is not None and holder.pid == os.getpid()
        assert holder.command == tuple(processes.command_of(os.getpid()))
    assert processes.port_holder(port) is None


def test_exits_come_in_their_order_with_code_and_signal(python: Any) -> None:
    watcher = ExitWatcher()
    try:
        first, second = (python("print('here', flush=True); input(); import os; os._exit(7)") for _ in range(2))
        assert watcher.watch(first.pid) and watcher.watch(second.pid)
        os.kill(second.pid, signal.SIGSEGV)
        assert watcher.woken.wait(5)
        seen = _until(watcher.take)
        assert [(e.pid, e.code, e.signal) for e in seen] == [(second.pid, None, signal.SIGSEGV)]
        first.stdin.write("\n")
        first.stdin.flush()
        seen = _until(watcher.take)
        assert [(e.pid, e.code, e.signal) for e in seen] == [(first.pid, 7, None)]
        assert first.wait() == 7, "the status is still there for the parent"
    finally:
        watcher.close()


def test_the_exit_of_somebody_elses_child_is_told_too(python: Any) -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '100']); print('here', flush=True); input(); p.wait()"
    parent = python(code)
    (child,) = processes.children_of(parent.pid)
    watcher = ExitWatcher()
    try:
        assert watcher.watch(child)
        os.kill(child, signal.SIGKILL)
        (seen,) = _until(watcher.take)
        assert (seen.pid, seen.code, seen.signal) == (child, None, signal.SIGKILL)
    finally:
        watcher.close()


def test_a_process_that_is_already_gone_cannot_be_watched() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    watcher = ExitWatcher()
    try:
        assert not watcher.watch(process.pid)
    finally:
        watcher.close()


@given(st.integers(0, 255))
def test_wait_statuses_of_exits(code: int) -> None:
    assert decode_wait_status(code << 8) == (code, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_wait_statuses_of_signals(number: signal.Signals) -> None:
    assert decode_wait_status(int(number) | 0x80) == (None, int(number))


def test_faulthandlers_text_is_read_as_it_really_is(tmp_path: Path) -> None:
    out = tmp_path / "dump.txt"
    code = (
        "import faulthandler, sys, threading\n"
        "event = threading.Event()\n"
        "started = threading.Event()\n"
        "def side():\n    started.set(); event.wait()\n"
        "t = threading.Thread(target=side, daemon=True); t.start(); started.wait()\n"
        f"def outer():\n    faulthandler.dump_traceback(open({str(out)!r}, 'w'))\n"
        "outer(); event.set(); t.join()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    threads = stacks.parse_faulthandler(out.read_text())
    assert len(threads) == 2
    main = next(thread for thread in threads if thread.name == "MainThread")
    assert [frame.function for frame in main.frames] == ["outer", "<module>"]
    assert main.frames[0].line == 8


@given(st.text())
def test_any_text_can_be_given_to_the_faulthandler_reader(text: str) -> None:
    for thread in stacks.parse_faulthandler(text):
        assert thread.ident >= 0


@pytest.mark.parametrize(
    ("path", "is_user"),
    [
        ("train.py", True),
        ("/home/me/lib/python/train.py", True),
        ("/home/me/torchtitan/train.py", True),
        ("/usr/lib/python3.12/threading.py", False),
        ("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", False),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", False),
        ("<frozen importlib._bootstrap>", False),
        (stacks.__file__, False),
        ("", False),
    ],
)
def test_which_files_are_the_users(path: str, is_user: bool) -> None:
    assert is_user_file(path) is is_user


@pytest.mark.parametrize(
    ("line", "kill"),
    [
        ("Out of memory: Killed process 4711 (python3) total-vm:1kB", ("kernel", 4711)),
        ("Memory cgroup out of memory: Killed process 12 (pt_main_thread) total-vm:1kB", ("cgroup", 12)),
        ("oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null)", None),
        ("python3[12]: segfault at 0 ip 0", None),
    ],
)
def test_kernel_log_lines(line: str, kill: tuple[str, int] | None) -> None:
    assert parse_kill(line) == (MemoryKill(source=kill[0], detail=line, pid=kill[1]) if kill else None)


def test_counters_of_both_cgroup_versions(tmp_path: Path) -> None:
    two, one, none = tmp_path / "v2", tmp_path / "v1", tmp_path / "none"
    for folder in (two, one, none):
        folder.mkdir()
    (two / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    (two / "memory.max").write_text("1073741824\n")
    (one / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    (one / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert (kill_count(two), memory_limit(two)) == (2, 1 << 30)
    assert (kill_count(one), memory_limit(one)) == (5, None)
    assert (kill_count(none), memory_limit(none)) == (None, None)


def test_our_own_cgroup_is_found_where_the_kernel_accounts_memory() -> None:
    folders = memory_cgroups(os.getpid())
    assert all(folder.is_dir() for folder in folders)
    if Path("/sys/fs/cgroup/memory").is_dir():
        assert Path("/sys/fs/cgroup/memory") in folders


def test_an_unreadable_kernel_log_is_an_empty_one(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "missing")
    assert not log.readable
    assert log.new_lines() == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(4, 32))
def test_the_pulse_always_knows_the_newest_record(bursts: list[int], capacity: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-00000.ring"
        pulse = Pulse(path, 0.0)
        assert not pulse.beat() and not pulse.has_ring
        recorder = Recorder(path, rank=0, capacity=capacity)
        newest = 0
        for burst in bursts:
            for _ in range(burst):
                newest = recorder.point("step")
            assert pulse.beat()
            assert pulse.seq == newest
            assert not pulse.beat()
        recorder.close()
        pulse.close()


def test_the_pulse_measures_steps_and_follows_a_restarted_rank(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.ring"
    recorder = Recorder(path, rank=0)
    pulse = Pulse(path, time.monotonic())
    for step in range(4):
        recorder.steps = step
        recorder.point("step")
        pulse.beat()
    assert pulse.step == 3
    assert pulse.step_seconds() is not None and pulse.step_seconds() < 1.0
    recorder.close()
    again = Recorder(path, rank=0)
    again.point("step")
    assert pulse.beat()
    assert (pulse.seq, pulse.step, pulse.step_seconds()) == (1, 0, None)
    again.close()
    pulse.close()


@pytest.mark.parametrize("looks_between", [True, False])
def test_the_start_of_a_rank_is_not_a_step(tmp_path: Path, looks_between: bool) -> None:
    path = tmp_path / "rank-00000.ring"
    recorder = Recorder(path, rank=0)
    pulse = Pulse(path, time.monotonic())
    recorder.point("import")
    pulse.beat()
    time.sleep(0.3)  # what imports and the first step take; the pulse must not count it
    for step in range(1, 6):
        recorder.steps = step
        recorder.point("step")
        if looks_between:
            pulse.beat()
            assert (pulse.step_seconds() is None) == (step == 1)
    pulse.beat()
    assert pulse.step_seconds() is not None and pulse.step_seconds() < 0.06
    recorder.close()
    pulse.close()


def test_a_started_collective_is_waited_for_as_long_as_a_peer_has_not_started_it(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    recorders = [Recorder(run_dir.ring(rank), rank=rank) for rank in range(2)]
    for number, rank in ((1, 0), (1, 1), (2, 1)):
        span = recorders[rank].begin(
            "collective", op="all_reduce", group="default", collective_seq=number, flags=FLAG_ASYNC, file="a.py", line=3
        )
        recorders[rank].end(span, "collective")
    recorders[0].begin("tracker", file="a.py", line=2)
    starts = {0: 0.0, 1: 0.0}
    assert [(s.phase, s.waits) for s in activities(run_dir, starts)] == [("tracker", False), ("collective", True)]
    recorders[0].begin(
        "collective", op="all_reduce", group="default", collective_seq=2, flags=FLAG_ASYNC, file="a.py", line=3
    )
    assert [s.waits for s in activities(run_dir, starts)] == [True, False]
    for recorder in recorders:
        recorder.close()


@pytest.mark.parametrize(
    ("activities", "line"),
    [
        ([], None),
        (
            [Activity(0, "save", 69.0), *(Activity(rank, "barrier", 70.0) for rank in range(1, 8))],
            "rank 0 has been saving a checkpoint for 31 s; 7 ranks wait for it",
        ),
        ([Activity(0, "compile", 88.0), Activity(1, "compile", 90.0)], "ranks 0, 1 have been compiling for 12 s"),
        (
            [
                Activity(0, "collective", 90.0, "a.py:3", "all_reduce"),
                Activity(1, "collective", 80.0, "a.py:9", "barrier"),
            ],
            "every rank has been waiting for another for 10 s: "
            "rank 0 in all_reduce at a.py:3; rank 1 in barrier at a.py:9",
        ),
    ],
)
def test_the_sentence_about_who_waits(activities: list[Activity], line: str | None) -> None:
    assert waiting_line(activities, 100.0) == line


def test_a_poll_wakes_up_again_and_again_and_one_long_wait_does_not(python: Any) -> None:
    polls = python("import time\nprint('here', flush=True)\nwhile True:\n    time.sleep(0.01)")
    waits = python("import threading\nprint('here', flush=True)\nthreading.Event().wait()")
    _until(lambda: processes.sample(waits.pid).syscall == "futex")
    before = processes.sample(waits.pid).switches
    first = processes.sample(polls.pid).switches
    _until(lambda: processes.sample(polls.pid).switches >= first + 10)
    assert processes.sample(waits.pid).switches == before
    assert to_json(processes.sample(waits.pid))["switches"] == before


def test_pages_of_a_mapped_file_are_counted_beside_the_memory_of_its_own(python: Any, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(bytes(32 << 20))
    reads = python(
        f"import mmap\nfile = open({str(tmp_path / 'tokens')!r}, 'rb')\n"
        "tokens = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\nprint('here', flush=True)\ninput()\n"
        "total = sum(tokens[at] for at in range(0, len(tokens), 4096))\nprint('here', flush=True)\ninput()"
    )
    before = processes.sample(reads.pid)
    reads.stdin.write("\n")
    reads.stdin.flush()
    assert reads.stdout.readline() == "here\n"
    after = processes.sample(reads.pid)
    assert 30 << 20 <= after.rss_file - before.rss_file <= 40 << 20
    assert abs((after.rss - after.rss_file) - (before.rss - before.rss_file)) < 4 << 20
    assert to_json(after)["rss_file"] == after.rss_file
