"""Which process wrote something: host, boot, PID namespace, PID and start time.

A PID alone names nobody: another host, another container and, sooner or later, the same host give it to a stranger.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_START_TIME = 19  # in /proc/PID/stat, counted from the state behind the command name


def _here() -> dict[str, Any]:
    """What all processes that can see each other by PID have in common."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot = namespace = ""
    return {"host": os.uname().nodename, "boot_id": boot, "pid_ns": namespace}


def _start_ticks(pid: int) -> int | None:
    """When the process was started, in clock ticks since boot; None for a process that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[_START_TIME]) if len(fields) > _START_TIME and fields[0] not in (b"Z", b"X") else None


def identity() -> dict[str, Any]:
    """Who this process is, for the files that it writes."""
    pid = os.getpid()
    return {**_here(), "pid": pid, "start_ticks": _start_ticks(pid)}


def is_near(who: Mapping[str, Any]) -> bool:
    """Whether the writer's PID means anything here: same host, same boot, same PID namespace."""
    return all(who.get(name) == value for name, value in _here().items())


def live_pid(who: Mapping[str, Any]) -> int | None:
    """The writer's PID if that very process still runs here, or None: gone, a stranger by now, or out of sight."""
    pid, started = who.get("pid"), who.get("start_ticks")
    if not isinstance(pid, int) or started is None or not is_near(who):
        return None
    return pid if _start_ticks(pid) == started else None
