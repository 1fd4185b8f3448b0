"""Joins the rooms that may not know each other: the launcher's supervisor, the rules, and the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from model_check.diagnose import Examiner, render
from model_check.launch.supervisor import Limits, Supervisor
from model_check.observe.service import request
from model_check.rundir import RunDir, Verdict


def supervisor_for(directory: RunDir, limits: Limits) -> Supervisor:
    """A supervisor whose findings come from the rules and go to standard error."""
    examiner = Examiner(directory)
    color = sys.stderr.isatty()
    return Supervisor(
        directory,
        examine=lambda _, live: examiner.update(live=live),
        say=lambda line: print(f"[model-check] {line}", file=sys.stderr, flush=True),
        show=lambda verdict: print(render(verdict, color=color), file=sys.stderr, flush=True),
        request_flight=request,
        limits=limits,
    )


def show_findings(verdict: Verdict, supervisor: Supervisor) -> None:
    """The findings as a person reads them, root cause first; one that stands above already takes one line."""
    sys.stdout.flush()
    if verdict.findings:
        told = supervisor.announcements.told
        print(render(verdict, color=sys.stderr.isatty(), told_before=told), file=sys.stderr, flush=True)


def short(path: Path) -> str:
    """Relative where that is shorter, so that it can be typed after `model-check diagnose`."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
