"""The control groups of a process, and how much memory and how many cores they leave it.

`docker --cpus 2` and a CPU limit of Kubernetes show all cores of the host, but may grant only the time of two.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_V1_CPU = _ROOT / "cpu"


def memory_cgroups(pid: int) -> list[Path]:
    """The folders of the memory cgroups a process is in, innermost first, v1 and v2."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            roots = [root for root in (_ROOT, _ROOT / "unified") if (root / "cgroup.controllers").exists()]
        elif "memory" in controllers.split(","):
            roots = [_ROOT / "memory"]
        else:
            continue
        for root in roots:
            folder = root / path.strip("/")
            while True:
                if folder.is_dir():
                    found.append(folder)
                if folder == root or root not in folder.parents:
                    break
                folder = folder.parent
    return found


def memory_limit(folder: Path) -> int | None:
    """The cgroup's limit in bytes, or None where there is none."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        value = _read(folder / name)
        # v1 writes "no limit" as a number near 2^63.
        if value.isdigit() and int(value) < 1 << 60:
            return int(value)
    return None


def memory_in_use(folder: Path) -> int | None:
    """What the cgroup's processes hold, in bytes, without the file cache that the kernel gives back when asked."""
    held = next((v for n in ("memory.current", "memory.usage_in_bytes") if (v := _read(folder / n)).isdigit()), None)
    if held is None:
        return None
    cache = 0
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file"):
            cache = int(value)
    return max(0, int(held) - cache)


def kill_count(folder: Path) -> int | None:
    """How many processes the kernel has killed in this cgroup, or None where it does not say."""
    for name in ("memory.events", "memory.oom_control"):
        for line in _read(folder / name).splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.isdigit():
                return int(value)
    return None


def container_limit() -> int | None:
    """The tightest memory limit around this process, in bytes; None if there is none."""
    limits = [limit for folder in memory_cgroups(os.getpid()) if (limit := memory_limit(folder)) is not None]
    return min(limits, default=None)


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
