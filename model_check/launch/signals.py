"""Requests to stop sent to the launcher: SIGINT, SIGTERM, SIGHUP, and SIGUSR1, with which Slurm warns of the end."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
REPEATED_WITHIN_S = 1.0


class StopBeforeStart(Exception):
    """A request to stop came while there were no ranks to tell."""


class Requests:
    """Which requests to stop came, and whether one of them ends the wait for the ranks' save.

    A Ctrl-C after any other does, and so does a SIGTERM, but not one that comes at the heels of the first: schedulers
    repeat theirs, and tell a job's launcher and its whole group. Nor does the SIGTERM after Slurm's warning, which is
    the first that asks; nor does a terminal that is closed meanwhile.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # the first
        self.again: int | None = None  # the one that ends the wait
        self._asked_at: float | None = None

    def note(self, number: int) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number = number
        elif self.again is None and self._ends_the_wait(number, now):
            self.again = number
        if self._asked_at is None and number != signal.SIGUSR1:
            self._asked_at = now

    def _ends_the_wait(self, number: int, now: float) -> bool:
        if number == signal.SIGTERM:
            return self._asked_at is not None and now - self._asked_at > REPEATED_WITHIN_S
        return number == signal.SIGINT


class StopRequest(Requests):
    """Catches the signals while a job runs, and gives the old handlers back. Works on the main thread only.

    Armed, a signal is noted for the supervision, which tells the ranks. Not armed (no ranks, or a wait for other hosts
    that nothing else can interrupt), it raises on the spot.
    """

    def __init__(self) -> None:
        super().__init__()
        self._armed = False
        self._previous: dict[int, Any] = {}

    def arm(self) -> None:
        self._armed = True

    def disarm(self) -> None:
        self._armed = False
        if self.number is not None:
            raise StopBeforeStart

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        first = self.number is None
        self.note(number)
        if first and not self._armed:
            raise StopBeforeStart
