"""What a rank may take of the host's memory: a limit that ends it by name, and settings that make it need less.

A CPU rank is limited by RLIMIT_AS: an allocation beyond it fails inside the rank, on the line that asked for it. CUDA
reserves far more address space than it uses, so a GPU rank is watched instead: one that holds more than its limit is
ended, and the journal says why.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import psutil

from model_check.errors import LaunchError
from model_check.record.events.memory import MemoryKill
from model_check.supervise import processes
from model_check.supervise.hooks import EndJob, Hooks, JobView

GB = 10**9
# Thread stacks, malloc arenas, gloo's buffers and the first step: below this the errors are wild, and some are hangs.
_ROOM_TO_WORK_BYTES = 700 * 10**6
# An interpreter with torch and its usual companions, measured on CPU builds.
_COLD_START_BYTES = 1_200 * 10**6
_MOST_ADDRESSES = 2.0**62  # beyond it the kernel cannot count, and no machine has as many
_LOOK_EVERY_S = 0.25
_M_ARENA_MAX = -8

_LOW_MEMORY = {
    "NCCL_BUFFSIZE": str(1 << 20),  # a quarter of the default, per channel and peer
    "NCCL_MAX_CTAS": "8",  # channels, each with buffers of its own
    "NCCL_NVLS_ENABLE": "0",  # multicast buffers on the switch
    "MALLOC_ARENA_MAX": "2",  # by default eight per core, each keeping what its threads freed
    "TORCHINDUCTOR_COMPILE_THREADS": "2",  # compiler processes per rank, each with torch in memory
}
_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def low_memory_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What `launch.low_memory` sets; what the user has set stays as it is."""
    chosen = {name: value for name, value in _LOW_MEMORY.items() if name not in environ}
    if not any(name in environ for name in _ALLOCATOR_NAMES):
        chosen |= dict.fromkeys(_ALLOCATOR_NAMES, "expandable_segments:True")
    return chosen


def use_less_memory() -> None:
    """Sets the variables here, before torch is imported, for this process and all it starts."""
    os.environ.update(low_memory_variables(os.environ))
    # The C library read its variable when this process began; ranks that are forked from it inherit this instead.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, int(os.environ["MALLOC_ARENA_MAX"]))


def check_address_space(limit_gb: float, *, forked: bool) -> None:
    """Refuses a limit that torch itself would not fit into. `forked`: ranks start with what this process has mapped."""
    needed = int(psutil.Process().memory_info().vms) + _ROOM_TO_WORK_BYTES if forked else _COLD_START_BYTES
    if limit_gb * GB < needed:
        raise LaunchError(
            f"launch.memory_limit_gb={limit_gb:g} is below the {needed / GB:.1f} GB of address space "
            "that a rank maps before its first step",
            remedy=f"set it to {needed / GB + 1:.0f} or more, or to null",
        )


def limit_address_space(limit_gb: float) -> None:
    """For this process and its children; an allocation beyond it raises where it is made."""
    limit = int(min(limit_gb * GB, _MOST_ADDRESSES))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


@dataclass
class ResidentWatch:
    """Ends a rank that holds more than its limit, as the kernel would; what it was goes into the journal first."""

    limit_gb: float
    _looked_at: float = 0.0

    def look(self, view: JobView) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        for rank in view.running:
            pid = view.pids[rank]
            held = held_bytes(pid)
            if held > self.limit_gb * GB:
                detail = f"rank {rank} held {held / GB:.2f} GB of host memory; launch.memory_limit_gb={self.limit_gb:g}"
                view.journal.write(MemoryKill(source="limit", detail=detail, pid=pid))
                os.kill(pid, signal.SIGKILL)

    def added_to(self, hooks: Hooks) -> Hooks:
        """The same hooks, with a look before each poll."""
        poll = hooks.on_poll

        def on_poll(view: JobView) -> EndJob | None:
            self.look(view)
            return poll(view) if poll is not None else None

        return replace(hooks, on_poll=on_poll)


def held_bytes(pid: int) -> int:
    """What the process keeps in memory that no file can bring back: its own pages and shared ones."""
    sizes = processes.status_of(pid)
    return sum(int(sizes.get(name, "0 kB").split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
