"""Which process wrote something: host, boot, PID namespace, PID and start time.

A PID alone identifies no process: another host, another container and eventually the same host reuse it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_START_TIME = 19  # field of /proc/PID/stat, counted from the state after the command name


def _here() -> dict[str, Any]:
    """Identifies the set of processes that can see each other by PID."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot = namespace = ""
    return {"host": os.uname().nodename, "boot_id": boot, "pid_ns": namespace}


def place() -> str:
    """The same in a few characters, for names of files."""
    return hashlib.blake2s("/".join(_here().values()).encode(), digest_size=4).hexdigest()


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[_START_TIME]) if len(fields) > _START_TIME and fields[0] not in (b"Z", b"X") else None


def identity() -> dict[str, Any]:
    """The identity of this process, for the files that it writes."""
    pid = os.getpid()
    return {**_here(), "pid": pid, "start_ticks": start_ticks(pid)}


def is_near(who: Mapping[str, Any]) -> bool:
    """Whether the writer's PID means anything here: same host, same boot, same PID namespace."""
    return all(who.get(name) == value for name, value in _here().items())


def live_pid(who: Mapping[str, Any]) -> int | None:
    """The writer's PID if that same process still runs here; None if it is gone or elsewhere, or its PID was reused."""
    pid, started = who.get("pid"), who.get("start_ticks")
    if not isinstance(pid, int) or started is None or not is_near(who):
        return None
    return pid if start_ticks(pid) == started else None
