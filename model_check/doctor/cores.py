"""How many programs may compute at once: cores that may be used, and how much of them a container is given.

`docker --cpus 2` and a CPU limit of Kubernetes leave all cores of the host in sight and grant the time of two.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from model_check.launch.memorykills import memory_cgroups

_V1_CPU = Path("/sys/fs/cgroup/cpu")


def usable_cores() -> int:
    return granted_cores(len(os.sched_getaffinity(0)), [*memory_cgroups(os.getpid()), _V1_CPU])


def granted_cores(in_sight: int, cgroups: Iterable[Path]) -> int:
    """At least one, and no more than the tightest quota of these cgroups."""
    quotas = [quota for folder in cgroups if (quota := _quota(folder)) is not None]
    return max(1, int(min([in_sight, *quotas])))


def _quota(folder: Path) -> float | None:
    """In cores; None where the cgroup sets none. Version 2 keeps it in one file, version 1 in two."""
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None  # "max", or -1
    return int(words[0]) / int(words[1])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
