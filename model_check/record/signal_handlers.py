"""Installs signal handlers, except for signals that were ignored when the process began."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any


def handle(handlers: Mapping[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Installs the handlers and returns the previous ones. An ignored signal stays ignored, so that nohup works."""
    heard = {n: handler for n, handler in handlers.items() if signal.getsignal(n) is not signal.SIG_IGN}
    return {number: signal.signal(number, handler) for number, handler in heard.items()}
