"""Orphans: processes whose parent ended before them, and which become children of ours.

The launcher of a command and the nursery adopt the orphans of their job: only so can a second Ctrl-C still reach them.
Whoever adopts must also collect, or every short-lived helper of a job stays behind as a zombie.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable

from model_check.launch import processes

_PR_SET_CHILD_SUBREAPER = 36
_LOADER_WORKER = "pt_data_worker"  # the name that torch gives the processes of a DataLoader


def adopt_orphans() -> None:
    """From here on an orphan below this process becomes its child, instead of init's."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of_main_thread() -> list[int]:
    """The kernel gives orphans to the main thread. What another thread of ours has started is that thread's affair."""
    return processes.children_of_thread(os.getpid(), os.getpid())


def collect(pids: Iterable[int]) -> None:
    """Frees the process table of orphans that have ended. Their exit codes are nobody's business."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue  # collected meanwhile


def end_loader_workers(pids: Iterable[int]) -> None:
    """Ends orphaned loader workers: without their rank they serve nobody.

    Most notice its end themselves. A worker with a batch for a full pipe does not: it waits for a reader for ever.
    """
    for pid in pids:
        stat = processes.read_stat(pid)
        if stat is not None and stat.alive and stat.comm == _LOADER_WORKER:
            processes.send_signal(pid, signal.SIGKILL)
