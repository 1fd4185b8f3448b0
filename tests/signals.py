"""Signals for commands that a test starts."""

from __future__ import annotations

import signal


def hear_signals() -> None:
    """In a child, before its command: what nohup or a job in the background of a shell has switched off is on again."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
