"""The supervisor's state: one watched rank with its pulse, and one suspected stall.

The pulse tells how far a rank's black box has come. It looks only at the newest record: its number, its time, its step.
From these come the time since the last sign of life and the length of a step, all that is needed to suspect a stall.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from model_check.record.process_sample import RankSample
from model_check.record.rank_exits import RankExit
from model_check.record.ring import WAIT_PHASES, RingTail

_MEDIAN_OVER = 20  # looks at a rank that moved: a job that has become slower is judged by its new pace
_ACTIVE_CPU_S = 0.05
_ACTIVE_BYTES = 1 << 20


class Pulse:
    """Follows one ring. `beat` is cheap enough to call ten times a second for every rank."""

    def __init__(self, path: Path, started_at: float) -> None:
        self._ring = RingTail(path)
        self._generation = 0
        self._step_times: deque[float] = deque(maxlen=_MEDIAN_OVER)
        self._step_seen_at = started_at
        self.seq = 0
        self.step = -1
        self.worked_at: float | None = None  # when it last recorded work of its own
        self.last_at = started_at  # seconds of CLOCK_MONOTONIC; the start of the process until the ring has a record

    @property
    def has_ring(self) -> bool:
        return self._generation > 0

    def beat(self) -> bool:
        """Whether there are new records since the last call."""
        newest = self._ring.last_seq()
        if self._ring.generation != self._generation:  # a restarted rank has put a new ring in the place of the old one
            self._generation = self._ring.generation
            self.seq, self.step, self.worked_at = 0, -1, None
            self._step_times.clear()
        if newest == self.seq:
            return False
        self.seq = newest
        stamp = self._ring.stamp(newest)
        self.last_at = max(self.last_at, stamp.time_ns / 1e9)
        if stamp.phase not in WAIT_PHASES:  # asking others for something again and again is not progress
            self.worked_at = self.last_at
        if stamp.step > self.step:
            self._measure(stamp.step)
        return True

    def _measure(self, step: int) -> None:
        """The first step holds imports, compilation and the joining of the ranks: it says nothing about the others."""
        if self.step < 1 < step:
            first = self._ring.stamp(self._first_of_step(1))
            self.step, self._step_seen_at = first.step, first.time_ns / 1e9
        if 1 <= self.step < step:
            self._step_times.append((self.last_at - self._step_seen_at) / (step - self.step))
        self.step, self._step_seen_at = step, self.last_at

    def _first_of_step(self, step: int) -> int:
        """The oldest record still there that was written in this step or later. Steps only grow, so it is bisected."""
        held = range(self._ring.oldest_seq, self.seq + 1)
        return held[bisect_left(held, step, key=lambda seq: self._ring.stamp(seq).step, hi=len(held) - 1)]

    def step_seconds(self) -> float | None:
        """The median length of a step, or None before the second one."""
        return statistics.median(self._step_times) if self._step_times else None

    def close(self) -> None:
        self._ring.close()


@dataclass
class Rank:
    """One watched process."""

    rank: int
    pid: int
    pulse: Pulse
    started_at: float
    exit: RankExit | None = None
    cpu_s: float = 0.0
    io_bytes: int = 0

    def was_active(self, seen: RankSample) -> bool:
        """Whether it or a child computed for 50 ms since the last sample, or moved a megabyte since it last did.

        Bytes add up: a save over a slow network moves less than a megabyte between two samples.
        """
        cpu_s = seen.cpu_s + sum(child.cpu_s for child in seen.children)
        has_moved = seen.io_bytes - self.io_bytes > _ACTIVE_BYTES
        active = cpu_s - self.cpu_s > _ACTIVE_CPU_S or has_moved
        self.cpu_s = cpu_s
        if has_moved:
            self.io_bytes = seen.io_bytes
        return active


@dataclass
class Stall:
    """A suspicion: since when nothing moved, and which evidence has been taken."""

    since: float
    threshold_s: float
    gathered_at: float
    rounds: int = 1
    examined: bool = False
    line_due: float = 0.0
    looks: int = 0
    looked_at: float = 0.0
