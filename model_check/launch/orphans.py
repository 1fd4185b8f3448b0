"""Orphans: processes whose parent ended before them and that become our children.

The launcher of a command and the nursery adopt the orphans of their job, so that a second Ctrl-C can still reach them.
A process that adopts orphans must also reap them, or every short-lived helper of a job stays behind as a zombie.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable

from model_check.supervise import processes

_PR_SET_CHILD_SUBREAPER = 36
_LOADER_WORKER = "pt_data_worker"  # torch's name for DataLoader processes


def adopt_orphans() -> None:
    """From now on, an orphan below this process becomes its child instead of init's."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of_main_thread() -> list[int]:
    """The kernel gives orphans to the main thread. Children of our other threads are left to those threads."""
    return processes.children_of_thread(os.getpid(), os.getpid())


def collect(pids: Iterable[int]) -> None:
    """Reaps orphans that have ended. Nobody needs their exit codes."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue  # reaped meanwhile


def end_loader_workers(pids: Iterable[int]) -> None:
    """Ends orphaned loader workers, which are useless without their rank.

    Most notice its end themselves. A worker that writes a batch to a full pipe does not: it waits forever for a reader.
    """
    for pid in pids:
        stat = processes.read_stat(pid)
        if stat is not None and stat.alive and stat.comm == _LOADER_WORKER:
            processes.send_signal(pid, signal.SIGKILL)
