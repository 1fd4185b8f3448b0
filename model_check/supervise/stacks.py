"""Python stacks of running processes, taken from outside without stopping them.

py-spy reads the other process's memory, so it works while the process waits in a collective, holds the GIL inside C
code, or is stopped by a signal. Where it is refused (Yama, a container without the right) or missing we fall back on
the rank's own faulthandler (a signal makes it write its stacks to a file), and last on what the kernel knows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from model_check.record.stacks import FRAME_LINE, Frame, ProcessStacks, ThreadStack
from model_check.supervise import processes

TIMEOUT_S = 3.0
_FAULTHANDLER_WAIT_S = 0.5
_FAULT_THREAD = re.compile(r"^(?P<current>Current thread|Thread) (?P<ident>0x[0-9a-f]+)(?: \[(?P<name>[^]]*)\])?")

# A rank and the workers that it forked write into one file.
_one_at_a_time: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)


def py_spy_binary() -> str | None:
    """py-spy of this environment, or of the PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def take(
    pid: int, *, timeout_s: float = TIMEOUT_S, fault_file: Path | None = None, fault_signal: int = 0
) -> ProcessStacks:
    """The stacks of one process by the best means that works. Never raises: what went wrong is in `error`."""
    seen = _by_py_spy(pid, timeout_s)
    if seen.threads or not processes.is_alive(pid):
        return seen
    if fault_file is not None and fault_signal:
        told = _by_faulthandler(pid, fault_file, fault_signal)
        if told is not None:
            return replace(told, error=seen.error)
    return replace(_by_kernel(pid), error=seen.error)


def take_many(
    pids: Sequence[int], taker: Callable[[int], ProcessStacks] = take, *, workers: int = 8
) -> list[ProcessStacks]:
    """The stacks of several processes at once, in the order given."""
    if not pids:
        return []
    with ThreadPoolExecutor(min(workers, len(pids)), thread_name_prefix="model-check-stacks") as pool:
        return list(pool.map(taker, pids))


def py_spy_dump(pid: int, *options: str, timeout_s: float = TIMEOUT_S) -> tuple[list[dict[str, Any]], str | None]:
    """py-spy's own JSON, and the reason where there is none."""
    binary = py_spy_binary()
    if binary is None:
        return [], "py-spy is not installed"
    command = [binary, "dump", "--json", "--nonblocking", *options, "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False, text=True
        )
    except subprocess.TimeoutExpired:
        return [], f"py-spy gave no answer for {timeout_s:g} s"
    except OSError as error:
        return [], f"py-spy cannot be run: {error.strerror}"
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return [], lines[-1] if lines else f"py-spy ended with exit code {done.returncode}"
    try:
        threads = json.loads(done.stdout)
    except ValueError:
        return [], "py-spy's answer is not JSON"
    return (threads, None) if isinstance(threads, list) else ([], "py-spy's answer is not a list of threads")


def _by_py_spy(pid: int, timeout_s: float) -> ProcessStacks:
    # A nonblocking read races with the running interpreter: a torn read shows as an error and is worth one more try.
    threads, error = py_spy_dump(pid, timeout_s=timeout_s)
    if error and processes.is_alive(pid) and "ermission" not in error:
        threads, error = py_spy_dump(pid, timeout_s=timeout_s)
    return ProcessStacks(pid, time.monotonic(), "py-spy", tuple(map(_py_spy_thread, threads)), error)


def _py_spy_thread(thread: dict[str, Any]) -> ThreadStack:
    return ThreadStack(
        name=thread.get("thread_name") or "",
        ident=int(thread.get("thread_id") or 0),
        native_id=int(thread.get("os_thread_id") or 0),
        active=bool(thread.get("active")),
        gil=bool(thread.get("owns_gil")),
        frames=tuple(
            Frame(str(f.get("filename", "")), int(f.get("line") or 0), str(f.get("name", "")))
            for f in thread.get("frames", ())
        ),
    )


def _by_faulthandler(pid: int, file: Path, number: int) -> ProcessStacks | None:
    """Asks the process itself; it answers from a signal handler, even inside a C call, unless it is stopped."""
    if not processes.catches(pid, number):
        return None
    with _one_at_a_time[file]:
        text = _provoke(pid, file, number)
    threads = parse_faulthandler(text)
    return ProcessStacks(pid, time.monotonic(), "faulthandler", tuple(threads)) if threads else None


def _provoke(pid: int, file: Path, number: int) -> str:
    """What the process appends to the file when it gets the signal."""
    try:
        before = file.stat().st_size
        os.kill(pid, number)
    except OSError:
        return ""
    deadline = time.monotonic() + _FAULTHANDLER_WAIT_S
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        grown = file.stat().st_size
        if grown > before and grown == size:
            break
        size = grown
    with file.open("rb") as stream:
        stream.seek(before)
        return stream.read().decode("utf-8", "replace")


def parse_faulthandler(text: str) -> list[ThreadStack]:
    """The threads in the text that `faulthandler.dump_traceback` writes."""
    found: list[tuple[str, int, bool, list[Frame]]] = []
    for line in text.splitlines():
        thread = _FAULT_THREAD.match(line)
        if thread:
            current = thread["current"] == "Current thread"
            found.append((thread["name"] or "", int(thread["ident"], 16), current, []))
            continue
        frame = FRAME_LINE.match(line)
        if frame and found:
            found[-1][3].append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    # A signal is handled on the main thread, which is therefore the current one.
    return [
        ThreadStack(name or ("MainThread" if current else ""), ident, 0, False, False, tuple(frames))
        for name, ident, current, frames in found
    ]


def _by_kernel(pid: int) -> ProcessStacks:
    symbols = processes.kernel_stack(pid)
    frames = tuple(Frame("[kernel]", 0, symbol) for symbol in symbols)
    thread = ThreadStack("MainThread", 0, pid, False, False, frames)
    return ProcessStacks(pid, time.monotonic(), "proc", (thread,) if frames else ())
