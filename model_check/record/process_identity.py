"""Which process wrote something: host, boot, PID namespace, PID and start time.

A PID alone identifies no process: another host, another container and eventually the same host reuse it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_TIME = 19  # field of /proc/PID/stat, counted from the state after the command name


@dataclass(frozen=True)
class Identity:
    """Names a process for good."""

    host: str = ""
    boot_id: str = ""
    pid_ns: str = ""  # the namespace in which the PID counts
    pid: int = 0
    start_ticks: int | None = None  # clock ticks since boot; None: the writer could not know


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


def is_near(who: Identity) -> bool:
    """Whether the writer's PID means anything here: same host, same boot, same PID namespace."""
    return all(getattr(who, name) == value for name, value in _here().items())


def live_pid(who: Identity) -> int | None:
    """The writer's PID if that same process still runs here; None if it is gone or elsewhere, or its PID was reused."""
    if not who.pid or who.start_ticks is None or not is_near(who):
        return None
    return who.pid if start_ticks(who.pid) == who.start_ticks else None
