"""Connects the supervisor to the terminal: where findings and lines go, and how they look."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from model_check import api
from model_check.diagnose import render
from model_check.launch.messages import Voice
from model_check.record import RunDir, Verdict
from model_check.supervise.supervisor import Limits, Supervisor


def supervisor_for(directory: RunDir, limits: Limits) -> Supervisor:
    """A supervisor whose findings come from the rules and go to standard error."""
    color = _in_color()
    voice = Voice()
    return api.supervisor_for(
        directory,
        limits,
        say=lambda line: voice.say(f"[model-check] {line}"),
        show=lambda verdict: voice.say(render(verdict, color=color)),
        fall_silent=voice.close,
    )


def show_findings(verdict: Verdict, supervisor: Supervisor, last_line: str = "") -> None:
    """The findings as a person reads them, root cause first; one that stands above already takes one line."""
    with suppress(OSError, ValueError, AttributeError):  # its reader may be gone
        sys.stdout.flush()
    supervisor.fall_silent()
    voice = Voice()
    if verdict.findings or verdict.notes:
        voice.say(render(verdict, color=_in_color(), told_before=supervisor.announcements.told))
    if last_line:
        voice.say(f"[model-check] {last_line}")
    voice.close()


def _in_color() -> bool:
    """Standard error may be closed or missing."""
    try:
        return sys.stderr.isatty()
    except (ValueError, AttributeError):
        return False


def short(path: Path) -> str:
    """Relative where that is shorter, so that it can be typed after `model-check diagnose`."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
