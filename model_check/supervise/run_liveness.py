"""Whether a run's launcher still watches it, and when it wrote last: for those who look at a run directory later.

A dead launcher leaves its pid, which another process may have by now, perhaps on another machine the directory was
copied to. So the launcher lives only where a process of that pid began before it signed, since the same boot.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from model_check.record import RunDir, read_jsonl
from model_check.supervise import processes

_TICKS = os.sysconf("SC_CLK_TCK")
_SAME_BOOT_S = 5.0  # the clock of the day may be set while a job runs


@dataclass(frozen=True)
class Watch:
    """A run's last launcher: does it watch right now, and the time of day of its last record."""

    alive: bool
    last_time: float
    elsewhere: str = ""  # the host it is on, where that is not this one: nobody here can tell whether it lives


def watch_of(run_dir: RunDir) -> Watch | None:
    """None where no launcher of ours has signed: nothing was started, or the directory is `attach`'s."""
    records = read_jsonl(run_dir.supervisor_events).records
    signed = next((record for record in reversed(records) if record.get("event") == "job_started"), None)
    if signed is None:
        return None
    last = records[-1]
    host = str(signed.get("host") or "")
    elsewhere = host if host not in ("", socket.gethostname()) else ""
    alive = not elsewhere and last.get("event") != "job_ended" and _signed_by_a_living(signed)
    return Watch(alive, _number(last.get("time")), elsewhere)


def _signed_by_a_living(signed: dict[str, Any]) -> bool:
    pid = signed.get("launcher_pid")
    at, day = _number(signed.get("t")), _number(signed.get("time"))
    if not isinstance(pid, int) or abs((day - at) - (time.time() - time.monotonic())) > _SAME_BOOT_S:
        return False
    stat = processes.read_stat(pid)
    return stat is not None and stat.alive and stat.start_ticks / _TICKS <= at + 1.0


def _number(value: object) -> float:
    """A time in seconds from a file that anybody may have written; 0 where it is none."""
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 1 << 36 else 0.0
