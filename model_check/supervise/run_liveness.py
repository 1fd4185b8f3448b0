"""Whether a run's launcher still watches it, and when it wrote last: for those who look at a run directory later.

A dead launcher leaves its pid, which another process may have by now, perhaps on another machine the directory was
copied to. So the launcher lives only where a process of that pid began before it signed, since the same boot.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

from model_check.record import RunDir
from model_check.record.events import Event, read_events
from model_check.record.events.process import JobOver, JobStarted
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
    events = read_events(run_dir.supervisor_events)
    signed = next((event for event in reversed(events) if isinstance(event, JobStarted)), None)
    if signed is None:
        return None
    last = events[-1]
    elsewhere = signed.host if signed.host not in ("", socket.gethostname()) else ""
    alive = not elsewhere and not isinstance(last, JobOver) and _signed_by_a_living(signed)
    return Watch(alive, _time(last), elsewhere)


def _signed_by_a_living(signed: JobStarted) -> bool:
    if not signed.launcher_pid or abs((_time(signed) - signed.t) - (time.time() - time.monotonic())) > _SAME_BOOT_S:
        return False
    stat = processes.read_stat(signed.launcher_pid)
    return stat is not None and stat.alive and stat.start_ticks / _TICKS <= signed.t + 1.0


def _time(event: Event) -> float:
    """The wall-clock time of an event from a file that anybody may have written; 0 where it makes no sense."""
    return event.time if event.time is not None and 0 <= event.time < 1 << 36 else 0.0
