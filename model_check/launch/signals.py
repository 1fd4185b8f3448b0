"""Requests to stop sent to the launcher: SIGINT, SIGTERM, SIGHUP, and SIGUSR1, with which Slurm warns of the end."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopBeforeStart(Exception):
    """A request to stop came while there were no ranks to tell."""


class StopRequest:
    """Catches the signals while a job runs, and gives the old handlers back. Works on the main thread only.

    Armed, a signal is noted for the supervision, which tells the ranks; a second Ctrl-C makes it urgent. Not armed
    (no ranks, or a wait for other hosts that nothing else can interrupt), it raises on the spot.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.urgent = False
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
        if self.number is not None:
            self.urgent = self.urgent or number == signal.SIGINT
            return
        self.number = number
        if not self._armed:
            raise StopBeforeStart
