"""Real jobs for the tests: a warm process that forks one launcher after the other, each with ranks of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from model_check.rundir import RunDir, read_jsonl

_HERE = Path(__file__).parent


def wait_until(what: Callable[[], Any], deadline_s: float = 20.0) -> Any:
    """The first true value of `what`; fails at the deadline."""
    end = time.monotonic() + deadline_s
    while not (value := what()):
        if time.monotonic() > end:
            pytest.fail(f"{what} did not become true in {deadline_s} s")
        time.sleep(0.01)
    return value


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclass
class RunningJob:
    """A launcher that runs now."""

    pid: int
    run_dir: RunDir
    stdout: Path
    result_file: Path
    _server: subprocess.Popen[str]
    _ended: int | None = None

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """The launcher's own wait status as a shell shows it."""
        if self._ended is None:
            assert self._server.stdout is not None
            status = int(json.loads(self._server.stdout.readline())["status"])
            self._ended = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return self._ended

    @property
    def result(self) -> dict[str, Any]:
        self.wait()
        return json.loads(self.result_file.read_text())

    @property
    def lines(self) -> list[str]:
        self.wait()
        return self.stdout.read_text().splitlines()

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_jsonl(self.run_dir.supervisor_events).records

    def rank_pids(self) -> dict[int, int]:
        return {e["rank"]: e["pid"] for e in self.events if e["event"] == "rank_started"}

    def marker(self, name: str) -> Path:
        return self.run_dir.root / name

    def wait_for(self, *names: str) -> None:
        for name in names:
            wait_until(self.marker(name).exists)


StartJob = Callable[..., RunningJob]


@pytest.fixture(scope="session")
def _launcher_server() -> Iterator[subprocess.Popen[str]]:
    server = subprocess.Popen(
        [sys.executable, str(_HERE / "launcher_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(_HERE.parents[1]), str(_HERE)])},
    )
    yield server
    assert server.stdin is not None and server.stdout is not None
    server.stdin.close()
    server.wait(timeout=10)
    server.stdout.close()


@pytest.fixture
def start_job(_launcher_server: subprocess.Popen[str], tmp_path: Path) -> Iterator[StartJob]:
    """`start_job("entry name", payload, nproc=2, …)` starts a launcher and returns at once."""
    jobs: list[RunningJob] = []

    def start(entry: str, payload: Any = None, **options: Any) -> RunningJob:
        number = len(jobs)
        run_dir = RunDir.create(tmp_path / f"run-{number}")
        job_files = {"stdout": str(tmp_path / f"stdout-{number}"), "result": str(tmp_path / f"result-{number}")}
        request = {"entry": entry, "payload": payload, "run_dir": str(run_dir.root), "options": options, **job_files}
        assert _launcher_server.stdin is not None and _launcher_server.stdout is not None
        _launcher_server.stdin.write(json.dumps(request) + "\n")
        _launcher_server.stdin.flush()
        pid = int(json.loads(_launcher_server.stdout.readline())["pid"])
        job = RunningJob(pid, run_dir, Path(job_files["stdout"]), Path(job_files["result"]), _launcher_server)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        if job._ended is None:
            os.kill(job.pid, signal.SIGKILL)
            job.wait()
