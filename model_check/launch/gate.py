"""How many ranks of this host may import at once, where ranks are not warm-started.

A warm start imports once for all ranks and needs no gate for that. Ranks that are interpreters of their own import at
the same moment: their peaks of memory add up and they share the cores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import psutil

from model_check.blackbox.gate import DEFAULT_PATIENCE_S, PATIENCE_VARIABLE, GatePlan
from model_check.errors import UsageError
from model_check.record import RunDir
from model_check.record.cgroups import memory_cgroups, memory_in_use, memory_limit

# What a rank may need until its imports are done: torch with CUDA libraries, transformers and datasets, with room.
IMPORT_NEED_BYTES = 1 << 30
_FREE_MEMORY_SHARE = 0.8


def plan_gate(run_dir: RunDir, nproc: int, *, followed: bool = False) -> GatePlan:
    """The gate of a job on this host. `followed`: the launcher shows its lines, so ranks leave them in a file."""
    cores = len(os.sched_getaffinity(0))
    return _plan(run_dir, slot_count(nproc, free_bytes=free_memory(), cores=cores), followed=followed)


def plan_compilations(run_dir: RunDir) -> GatePlan:
    """For ranks that are warm-started: of those that compile the same graph one does, the others load it."""
    return _plan(run_dir, 0)


def _plan(run_dir: RunDir, slots: int, *, followed: bool = False) -> GatePlan:
    return replace(GatePlan.in_run_dir(run_dir.root, slots, followed=followed), patience_s=patience(os.environ))


def patience(environ: Mapping[str, str]) -> float:
    """Seconds that a rank waits for a slot: its holder may be stopped, or it may compile a large model."""
    text = environ.get(PATIENCE_VARIABLE)
    if text is None:
        return DEFAULT_PATIENCE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{PATIENCE_VARIABLE}={text} is not a number of seconds", remedy="set it to 120, or unset it")
    return seconds


def slot_count(nproc: int, *, free_bytes: int, cores: int) -> int:
    """As many as the free memory holds, and one for every two cores; at least one."""
    fit = int(free_bytes * _FREE_MEMORY_SHARE) // IMPORT_NEED_BYTES
    return max(1, min(nproc, fit, cores // 2))


def free_memory() -> int:
    """What this process and its children may still take: of the machine, and of every cgroup limit above them."""
    free = psutil.virtual_memory().available
    for folder in memory_cgroups(os.getpid()):
        limit, used = memory_limit(folder), memory_in_use(folder)
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used))
    return free
