"""Requests to stop sent to the launcher: SIGINT, SIGTERM, SIGHUP, and SIGUSR1, Slurm's warning before the end.

When we run a user's script, SIGQUIT (Ctrl-\\) is one too, as under torchrun.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from types import FrameType
from typing import Any

from model_check.record.signal_handlers import handle

KEYS = (signal.SIGINT, signal.SIGQUIT)  # the terminal sends them to its whole foreground group
_MESSAGES = (signal.SIGUSR1, signal.SIGUSR2)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
REPEATED_WITHIN_S = 1.0
KEY_REPEATED_WITHIN_S = 0.5


class StopBeforeStart(Exception):
    """A request to stop came while there were no ranks to tell."""


class Requests:
    """Which requests to stop came, and whether one of them ends the wait for the ranks' save.

    A Ctrl-C or Ctrl-\\ after any other request ends it, and so does a SIGTERM, unless it comes right after the
    first request: schedulers repeat theirs, and signal both a job's launcher and its whole group. So do `timeout -s
    INT` and wrappers that pass a key on which the terminal has sent to all of them. The SIGTERM after Slurm's warning
    counts as the first request, and a terminal that is closed meanwhile ends nothing.
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
        if number == self.number and self._asked_at is not None and now - self._asked_at <= KEY_REPEATED_WITHIN_S:
            return False
        return number in KEYS


class StopRequest(Requests):
    """Catches the signals while a job runs, and gives the old handlers back. Works on the main thread only.

    `as_received`: the ranks get the signal that arrived, and SIGUSR1 and SIGUSR2 do not request a stop. Otherwise the
    ranks get SIGTERM.

    Armed, a signal is noted for the supervision, which tells the ranks. Not armed (no ranks, or a wait for other hosts
    that nothing else can interrupt), it raises on the spot.
    """

    def __init__(self, *, as_received: bool = False) -> None:
        super().__init__()
        self.as_received = as_received
        self.messages: deque[int] = deque()
        self._armed = False
        self._previous: dict[signal.Signals, Any] = {}

    def arm(self) -> None:
        self._armed = True

    def disarm(self) -> None:
        self._armed = False
        if self.number is not None:
            raise StopBeforeStart

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            handlers = dict.fromkeys(_STOP_SIGNALS, self._on_signal)
            if self.as_received:
                handlers |= {signal.SIGQUIT: self._on_signal, **dict.fromkeys(_MESSAGES, self._on_message)}
            self._previous = handle(handlers)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def for_ranks(self) -> int:
        """The signal that tells the ranks to stop."""
        return self.number if self.as_received and self.number is not None else signal.SIGTERM

    def _on_message(self, number: int, _frame: FrameType | None) -> None:
        self.messages.append(number)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        first = self.number is None
        self.note(number)
        if first and not self._armed:
            raise StopBeforeStart
