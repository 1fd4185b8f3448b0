"""Hears of exceptions that the script catches in silence, where the interpreter can tell (Python 3.12 and later).

sys.monitoring calls back only when an exception reaches a handler, so a script that raises nothing pays nothing.
Earlier interpreters have no such thing; there an exception is noticed when it leaves an instrumented call or when its
handler prints, logs or calls a collective.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from model_check.blackbox.box import BOX
from model_check.blackbox.exceptions import NOTES

_TOOL_ID = 4  # 0 to 2 and 5 are spoken for by debuggers, coverage, profilers and optimizers


def watch() -> None:
    """Listens to handlers in the user's own code."""
    if sys.version_info < (3, 12):
        return
    monitoring: Any = sys.monitoring
    if monitoring.get_tool(_TOOL_ID) is not None:
        return
    monitoring.use_tool_id(_TOOL_ID, "model-check")
    monitoring.register_callback(_TOOL_ID, monitoring.events.EXCEPTION_HANDLED, _handled)
    monitoring.set_events(_TOOL_ID, monitoring.events.EXCEPTION_HANDLED)


def _handled(code: CodeType, offset: int, error: BaseException) -> None:
    if BOX.recorder is not None and BOX.code.shown(code.co_filename) is not None:
        NOTES.caught(error)
