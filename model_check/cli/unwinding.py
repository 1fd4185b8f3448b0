"""Signals that end a verb unwind it, as Ctrl-C does, so that its jobs are ended and half-written files removed."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

from model_check.record.signal_handlers import handle


@contextlib.contextmanager
def signals_unwind_us() -> Iterator[None]:
    """SIGTERM, and SIGHUP, which comes when the terminal is closed; under nohup that is ignored, and stays so."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    previous = handle({signal.SIGTERM: leave, signal.SIGHUP: leave})
    try:
        yield
    finally:
        handle(previous)
