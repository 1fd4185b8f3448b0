"""The pulse of a rank: how far its black box has come, read in microseconds without decoding what is in it.

Looks only at the newest record of the ring: its number, its time, its step. From these come the time since the last
sign of life and the length of a step, which is all that is needed to suspect a stall.
"""

from __future__ import annotations

import mmap
import statistics
import struct
from collections import deque
from pathlib import Path

from model_check.record import ring

_SEQ = struct.Struct("<Q")
_PHASE_OFFSET = struct.calcsize("<QQB")
_STEP_OFFSET = struct.calcsize("<QQBBBB")
_STEP = struct.Struct("<i")
# Records of a rank that asks others for something; asking repeatedly is not progress.
_ASKING = frozenset(ring.PHASES.index(phase) for phase in ("collective", "p2p", "barrier", "init", "store", "gate"))
_MEDIAN_OVER = 20  # looks at a rank that moved: a job that has become slower is judged by its new pace


class Pulse:
    """Follows one ring. `beat` is cheap enough to call ten times a second for every rank."""

    def __init__(self, path: Path, started_at: float) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._inode = 0
        self._records_at = 0
        self._capacity = 0
        self._step_times: deque[float] = deque(maxlen=_MEDIAN_OVER)
        self._step_seen_at = started_at
        self.pid = 0
        self.seq = 0
        self.step = -1
        self.worked_at: float | None = None  # when it last recorded work of its own
        self.last_at = started_at  # seconds of CLOCK_MONOTONIC; the start of the process until the ring has a record

    @property
    def has_ring(self) -> bool:
        return self._map is not None

    def beat(self) -> bool:
        """Whether there are new records since the last call."""
        if not self._open_current():
            return False
        newest = self._newest()
        if newest == self.seq:
            return False
        self.seq = newest
        self.last_at = max(self.last_at, self._time_of(newest))
        if self._phase_of(newest) not in _ASKING:
            self.worked_at = self.last_at
        step = self._step_of(newest)
        if step > self.step:
            self._measure(step)
        return True

    def _measure(self, step: int) -> None:
        """The first step holds imports, compilation and the joining of the ranks: it says nothing about the others."""
        if self.step < 1 < step:
            first = self._first_of_step(1)
            self.step, self._step_seen_at = self._step_of(first), self._time_of(first)
        if 1 <= self.step < step:
            self._step_times.append((self.last_at - self._step_seen_at) / (step - self.step))
        self.step, self._step_seen_at = step, self.last_at

    def step_seconds(self) -> float | None:
        """The median length of a step, or None before the second one."""
        return statistics.median(self._step_times) if self._step_times else None

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None

    def _open_current(self) -> bool:
        """A restarted rank puts a new file in the place of the old one."""
        try:
            inode = self._path.stat().st_ino
        except OSError:
            return self._map is not None
        if self._map is not None and inode == self._inode:
            return True
        header = ring.read_header(self._path)
        if not header:
            return False
        self.close()
        with self._path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._inode = inode
        self._capacity = int(header.get("capacity", ring.CAPACITY))
        self._records_at = ring.HEADER_BYTES + int(header.get("strings_bytes", ring.STRINGS_BYTES))
        self.pid = int(header.get("pid", 0))
        self.seq, self.step, self.worked_at = 0, -1, None
        self._step_times.clear()
        return True

    def _slot(self, seq: int) -> int:
        return self._records_at + (seq - 1) % self._capacity * ring.RECORD.size

    def _time_of(self, seq: int) -> float:
        assert self._map is not None, "records are read from an open ring"
        (time_ns,) = _SEQ.unpack_from(self._map, self._slot(seq) + _SEQ.size)
        return float(time_ns / 1e9)

    def _step_of(self, seq: int) -> int:
        assert self._map is not None, "records are read from an open ring"
        (step,) = _STEP.unpack_from(self._map, self._slot(seq) + _STEP_OFFSET)
        return int(step)

    def _phase_of(self, seq: int) -> int:
        assert self._map is not None, "records are read from an open ring"
        return self._map[self._slot(seq) + _PHASE_OFFSET]

    def _first_of_step(self, step: int) -> int:
        """The oldest record still there that was written in this step or later. Steps only grow, so it is bisected."""
        low, high = max(1, self.seq - self._capacity + 1), self.seq
        while low < high:
            middle = (low + high) // 2
            if self._step_of(middle) >= step:
                high = middle
            else:
                low = middle + 1
        return low

    def _stored(self, seq: int) -> int:
        """The number of the record in the slot of `seq`: itself, an older one, or a newer one that took its place."""
        assert self._map is not None, "records are read from an open ring"
        (stored,) = _SEQ.unpack_from(self._map, self._slot(seq))
        return stored

    def _newest(self) -> int:
        """Gallops from the last known number: a slot that holds a record at least as new proves the ring is past it."""
        newest = self.seq
        while (stored := self._stored(newest + 1)) > newest:
            newest = stored
            stride = 1
            while stride < self._capacity and (stored := self._stored(newest + stride)) >= newest + stride:
                newest = stored
                stride *= 2
        return newest
