"""Runs a command under a memory limit for all of its processes together, and plays the OOM killer where it is reached.

    python benchmarks/memory_warden.py --limit-mib 1000 -- torchrun --nproc-per-node 8 train.py

A stand-in for a cgroup's memory.max on machines where none may be made: the proportional set sizes (PSS) of the command
and all its descendants are added up many times a second; over the limit the largest process gets SIGKILL. The last
line on standard output is JSON: exit code, kills, peak. The exit code is the command's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

_LOOK_EVERY_S = 0.05


@dataclass
class Watched:
    """What the warden saw."""

    exit_code: int = 0
    peak_mib: float = 0.0
    kills: list[float] = field(default_factory=list)  # MiB of each process at its end


def pss_bytes(pid: int) -> int:
    """A process's share of the memory it uses; pages that N processes share count one N-th in each."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def job_sizes(pid: int) -> dict[int, int]:
    """PSS of every process of the job."""
    with contextlib.suppress(psutil.NoSuchProcess):
        job = psutil.Process(pid)
        return {process.pid: pss_bytes(process.pid) for process in [job, *job.children(recursive=True)]}
    return {}


def watch(command: list[str], limit_bytes: int, env: dict[str, str] | None = None) -> Watched:
    """Runs the command to its end."""
    seen = Watched()
    job = subprocess.Popen(command, env=env, stdout=sys.stderr)
    while True:
        try:
            code = job.wait(timeout=_LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            _look(job.pid, limit_bytes, seen)
            continue
        seen.exit_code = code if code >= 0 else 128 - code
        return seen


def _look(pid: int, limit_bytes: int, seen: Watched) -> None:
    sizes = job_sizes(pid)
    total = sum(sizes.values())
    seen.peak_mib = max(seen.peak_mib, total / 2**20)
    if total > limit_bytes:
        largest = max(sizes, key=lambda one: sizes[one])
        seen.kills.append(sizes[largest] / 2**20)
        with contextlib.suppress(ProcessLookupError):
            os.kill(largest, 9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-mib", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    seen = watch(command, options.limit_mib << 20)
    print(json.dumps(asdict(seen)), flush=True)
    sys.exit(seen.exit_code)


if __name__ == "__main__":
    main()
