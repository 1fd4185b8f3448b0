"""Marks of resident memory in the rank's events, so that a host out of memory has a history."""

from __future__ import annotations

import os
import time

from model_check.blackbox import memory_growth
from model_check.blackbox.box import BOX

_PERIOD_S = 5.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _Clock:
    next_mark = 0.0


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def mark(at: str) -> None:
    """Writes down how much memory the process holds now."""
    _Clock.next_mark = time.monotonic() + _PERIOD_S
    recorder = BOX.recorder
    if recorder is not None:
        BOX.event("memory", rss=resident_bytes(), at=at, step=recorder.steps)


def mark_now_and_then() -> None:
    """After a step: a mark every few seconds."""
    if time.monotonic() >= _Clock.next_mark:
        mark("step")
        if BOX.recorder is not None:
            try:
                memory_growth.look(resident_bytes())
            except Exception as error:  # the script's objects may do anything when inspected
                BOX.event("growth_failed", error=f"{type(error).__name__}: {error}")
