"""Real jobs for the tests: a warm process that forks one launcher after the other, each with ranks of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from launch_jobs import RunningJob, StartJob

from model_check.record import RunDir

_HERE = Path(__file__).parent


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
            with suppress(ProcessLookupError):
                os.kill(job.pid, signal.SIGKILL)
            job.wait()
        shutil.rmtree(job.run_dir.logs.resolve(), ignore_errors=True)
