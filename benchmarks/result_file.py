"""Writes the result of a benchmark, always with the command, date, commit, versions and hardware that produced it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from model_check.record.nvml import read_gpus

HERE = Path(__file__).resolve().parent
FIELDS = ("command", "date", "commit", "versions", "hardware")


def result_path(name: str) -> Path:
    """Where the result of today's run belongs."""
    return HERE / "results" / f"{date.today().isoformat()}-{name}.json"


def write_result(path: Path, body: dict[str, Any], packages: tuple[str, ...] = ("torch",)) -> None:
    """Records the versions of Python and of those `packages` that are installed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(origin(packages) | body, indent=1) + "\n")
    print(f"written: {path}", file=sys.stderr)


def origin(packages: tuple[str, ...]) -> dict[str, Any]:
    script, *arguments = sys.argv
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(script).name}", *arguments]),
        "date": date.today().isoformat(),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **_installed(packages)},
        "hardware": _hardware(),
    }


def _commit() -> str:
    """Ends in -dirty if files differ from the commit. Empty outside a clone; the test of all results rejects that."""
    words = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    return subprocess.run(words, cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()


def _installed(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _hardware() -> dict[str, Any]:
    return {
        "gpus": [gpu.name for gpu in read_gpus()],
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
