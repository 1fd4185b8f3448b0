"""A launcher that runs now, as a test sees it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from model_check.record import RunDir, read_jsonl


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
