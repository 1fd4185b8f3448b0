"""Shared by all tests: how to call the command line as a user does, and what must be gone afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# A busy machine stretches any example: how long one takes is measured in benchmarks, not here.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# A shell that starts the tests in the background makes them, and so every process of a test, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
# It hides every fault of a standard output that is buffered, as it is for users.
os.environ.pop("PYTHONUNBUFFERED", None)

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

# Small enough that a step takes milliseconds on one core.
TINY = (
    "training.context_length=64",
    "training.batch_size=2",
    "data.samples=400",
    "logging.tensorboard=false",
)


@dataclass
class Outcome:
    """A finished command."""

    code: int
    out: str
    err: str
    run_dir: Path

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def losses(self) -> list[float]:
        return [record["loss"] for record in self.metrics()]

    def verdict(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "verdict.json").read_text())  # type: ignore[no-any-return]


class Shell:
    """Runs commands in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs = 0

    def environment(self, **extra: str) -> dict[str, str]:
        outside = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GPU_RANK")}
        return {**outside, "OMP_NUM_THREADS": "1", **extra}

    def model_check(self, *arguments: str, timeout: float = 240, **env: str) -> Outcome:
        return self.run(str(BIN / "model-check"), *arguments, timeout=timeout, **env)

    def run(self, *command: str, timeout: float = 240, **env: str) -> Outcome:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment(**env), capture_output=True, text=True, timeout=timeout
        )
        return Outcome(done.returncode, done.stdout, done.stderr, self.folder)

    def train(self, *arguments: str, preset: str = "debug", **env: str) -> Outcome:
        """`model-check train` on a tiny model, into a run directory of its own."""
        self._runs += 1
        run_dir = self.folder / f"run{self._runs}"
        sets = [word for value in TINY for word in ("--set", value)]
        done = self.model_check("train", "--preset", preset, "--run-dir", str(run_dir), *sets, *arguments, **env)
        done.run_dir = run_dir
        return done


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """What a test leaves in the environment, a rank's mark say, would be inherited by the processes of the next one."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)
