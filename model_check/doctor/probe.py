"""Runs what may hang or crash in a process of its own, with a time limit.

A program answers with one line of JSON, the last of its output. Output goes to files, not pipes: a grandchild that
outlives its parent would hold a pipe open, and the doctor would wait for it. The files lie in memory, since a full disk
is one of the things the doctor is asked about.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from model_check.doctor.check import foreign_words

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"
_GRACE_S = 3.0
_RUNNING: set[subprocess.Popen[bytes]] = set()
T = TypeVar("T")
_SHORT = 160


@dataclass(frozen=True)
class Answer:
    """How a program ended. `problem` is empty where it did what it was asked for."""

    value: dict[str, Any]
    problem: str
    seconds: float
    output: str = ""


def ask(program: str, *arguments: str, limit_s: float, environ: Mapping[str, str]) -> Answer:
    """Runs a program of this room (`programs/<program>.py`) and reads its answer."""
    command = [sys.executable, str(PROGRAMS / f"{program}.py"), *arguments]
    done = call(command, limit_s=limit_s, environ=environ)
    if done.problem:
        return done
    last = done.output.strip().rpartition("\n")[2]
    try:
        value = json.loads(last)
    except ValueError:
        return Answer({}, f"answered {last[:_SHORT]!r}", done.seconds, done.output)
    return Answer(value, "", done.seconds, done.output)


def call(command: Sequence[str], *, limit_s: float, environ: Mapping[str, str], cwd: Path | None = None) -> Answer:
    """Runs a command until it ends or its time is over; then it and its children are ended."""
    started = time.monotonic()
    with _file_in_memory("output") as out, _file_in_memory("errors") as err:
        with _started(command, out, err, _with_package(environ), cwd) as process:
            try:
                code = process.wait(limit_s)
                problem = _ending(code, _text(err), _text(out)) if code else ""
            except subprocess.TimeoutExpired:
                problem = f"no answer within {limit_s:g} s"
        return Answer({}, problem, time.monotonic() - started, _text(out))


def _file_in_memory(name: str) -> IO[bytes]:
    """On a disk where the kernel refuses (vm.memfd_noexec=2, a sandbox)."""
    try:
        return os.fdopen(os.memfd_create(name), "w+b")
    except OSError:
        return tempfile.TemporaryFile("w+b")


@contextmanager
def _started(
    command: Sequence[str], out: IO[bytes], err: IO[bytes], environ: Mapping[str, str], cwd: Path | None
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env=dict(environ),
        cwd=cwd,
        start_new_session=True,
    )
    _RUNNING.add(process)
    try:
        yield process
    finally:
        _RUNNING.discard(process)
        # A launcher ends its ranks when asked; whoever does not listen is ended with its whole group.
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):  # it ended in the meantime
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def side_by_side(tasks: Sequence[Callable[[], T]], at_once: int) -> list[T]:
    """The results of tasks that wait for programs, in their order. An interrupt ends all programs under way."""
    if at_once < 2 or len(tasks) < 2:
        return [task() for task in tasks]
    with ThreadPoolExecutor(at_once) as pool:
        begun = [pool.submit(task) for task in tasks]
        try:
            return [task.result() for task in begun]
        except BaseException:
            # It came to this thread; the others wait for programs that have a session of their own.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_RUNNING):
                process.terminate()
            raise


def _with_package(environ: Mapping[str, str]) -> dict[str, str]:
    """The package must be found from any folder, behind whatever the user put first."""
    path = [part for part in (environ.get("PYTHONPATH", ""), str(PACKAGE_ROOT)) if part]
    return {**environ, "PYTHONPATH": os.pathsep.join(path)}


def _ending(code: int, err: str, out: str) -> str:
    """One sentence about a program that failed: its signal, or its last words."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in (err or out).splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("model-check: error: ")]
    words = (named[-1].removeprefix("model-check: error: ") if named else lines[-1]) if lines else "no message"
    return f"exit code {code}: {foreign_words(words)}"


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
