"""Lets the backend's threads put down what they hold before the interpreter ends.

A collective counts as done for the script a moment before gloo's thread lets go of its tensors, and for that the thread
takes the interpreter's lock. If the script ends within that moment the lock is not to be had any more: Python ends the
thread in the middle of C++ code, and the whole process aborts ("terminate called without an active exception") after
its last line, with or without us. Seen in torch 2.13 on a busy machine. destroy_process_group() waits for these threads
unless something else holds the group: where DistributedDataParallel was used, it does not help.
"""

from __future__ import annotations

import time
from pathlib import Path

_THREADS = "pt_gloo_runloop"
_PAUSE_S = 0.001
_QUIET = 2  # looks in a row: between two things to do a thread may stand still at the very moment it is looked at


def let_backends_finish(most_s: float = 1.0) -> None:
    """Waits while a thread of gloo's is at work, not while it waits: for a peer, say, who may never come."""
    until = time.monotonic() + most_s
    quiet = 0
    while (states := _states()) and quiet < _QUIET and time.monotonic() < until:
        time.sleep(_PAUSE_S)  # whoever waits for the interpreter has it meanwhile
        quiet = 0 if "R" in states else quiet + 1


def _states() -> list[str]:
    """Of each thread of gloo's, as the kernel sees it; empty where there is none, or no /proc."""
    states = []
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().startswith(_THREADS):
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue  # it ended while we looked
    return states
