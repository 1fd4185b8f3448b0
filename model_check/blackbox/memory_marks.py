"""How much memory a rank holds, written into its events now and then: a host that runs out of memory has a history."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from model_check.blackbox import memory_growth
from model_check.blackbox.box import BOX
from model_check.record.cgroups import container_limit
from model_check.record.events.memory import HostLimits, MemoryMark, RecordingFailed

GIB = 2**30
_PERIOD_S = 5.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Turn = Literal["START", "POST-IMPORT", "POST-MODEL", "FIRST-STEP"]


def read_memory() -> MemoryMark:
    """Now. Asks torch only where CUDA is already in use: a look must not create a context."""
    held = MemoryMark(rss=resident_bytes(), pss=shared_out_bytes())
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return held
    return replace(
        held,
        allocated=torch.cuda.memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        peak=torch.cuda.max_memory_allocated(),
    )


def in_words(held: MemoryMark) -> str:
    """RSS 1.21 GiB, PSS 0.40 GiB, device 33.42 GiB allocated, 34.10 reserved, 33.42 at its peak"""
    words = [f"RSS {held.rss / GIB:.2f} GiB"]
    if held.pss is not None:
        words.append(f"PSS {held.pss / GIB:.2f} GiB")
    if held.allocated is not None and held.reserved is not None and held.peak is not None:
        words.append(
            f"device {held.allocated / GIB:.2f} GiB allocated, {held.reserved / GIB:.2f} reserved, "
            f"{held.peak / GIB:.2f} at its peak"
        )
    return ", ".join(words)


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def shared_out_bytes() -> int | None:
    with contextlib.suppress(OSError):  # a kernel without it, or one that hides it
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return None


def read_host_limits() -> HostLimits:
    import psutil  # a script's own interpreter may lack it, and every start would pay for it

    memory = psutil.virtual_memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return HostLimits(
        total=memory.total,
        available=memory.available,
        address_space=None if soft == resource.RLIM_INFINITY else soft,
        cgroup=container_limit(),
    )


class _Clock:
    next_mark = 0.0


def mark(at: str) -> None:
    """Writes down how much memory the process holds now."""
    _Clock.next_mark = time.monotonic() + _PERIOD_S
    if BOX.recorder is not None:
        BOX.event(MemoryMark(rss=resident_bytes(), at=at, step=BOX.recorder.steps))


def mark_now_and_then() -> None:
    """After a step: a mark every few seconds."""
    if time.monotonic() < _Clock.next_mark:
        return
    mark("step")
    if BOX.recorder is not None:
        try:
            memory_growth.look(resident_bytes())
        except Exception as error:  # the script's objects may do anything when inspected
            BOX.event(RecordingFailed.by(error, "what grows in memory"))


class MemoryMarks:
    """The turning points of our trainer's start, as log lines and events. Each mark is made once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._reached: set[Turn] = set()

    def reach(self, turn: Turn) -> None:
        if turn in self._reached:
            return
        self._reached.add(turn)
        held = read_memory()
        self._say(f"MEM:{turn} {in_words(held)}")
        if BOX.recorder is not None:
            BOX.event(replace(held, mark=turn, at=turn.lower(), step=BOX.recorder.steps))
