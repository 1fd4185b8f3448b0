"""Which rank failed first, and which ones only lost a peer.

A rank that dies closes its connections, and its peers fail a moment later with an error of their own. Those are
victims: a victim is never the first failure while another rank has an error that is not about a lost peer.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from model_check.record import RunDir, read_json
from model_check.record.error_texts import is_lost_peer, lost_its_peer
from model_check.record.events import read_events
from model_check.record.events.crashes import UncaughtException
from model_check.record.events.job import CLEAN_CODES, EXIT_STOPPED_AND_SAVED, RankExit
from model_check.record.files import read_tail

EXIT_CODE_OF_A_HANG = 1  # no rank failed by itself, so none has a code of its own to give

_LONGEST = 200  # of a message on the launcher's own line; the log and the verdict have the whole of it


@dataclass(frozen=True)
class FailedRank:
    """A failed rank, and what is known about the reason."""

    exit: RankExit
    error: UncaughtException | None
    victim: bool
    began: float  # when its trouble began


def read_error(run_dir: RunDir, exit: RankExit, error_file: Path | None = None) -> UncaughtException | None:
    """The first exception this rank recorded in this attempt, or what torch's @record left in its error file."""
    for event in read_events(run_dir.events(exit.rank)):
        if isinstance(event, UncaughtException) and event.pid == exit.pid:
            return event
    left = read_json(error_file) if error_file else None
    return _torch_error(left) if isinstance(left, dict) else None


def _torch_error(left: dict[str, Any]) -> UncaughtException:
    """torch.distributed.elastic's error file in the shape of our own record."""
    body = left.get("message", left)
    if not isinstance(body, dict):
        return UncaughtException(message=str(body))
    kind, _, message = str(body.get("message", "")).partition(": ")
    extra = body.get("extraInfo")
    stack = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    return UncaughtException(type=kind, message=message, traceback=str(stack))


def weigh(exit: RankExit, error: UncaughtException | None, log: Path) -> FailedRank:
    """Decides whether a failed rank is a victim, and when its trouble began."""
    victim = lost_its_peer(error, exit, read_tail(log) if error is None else "")
    began = min(error.t, exit.t) if error is not None and error.t else exit.t
    return FailedRank(exit, error, victim, began)


def first_failure(failed: Sequence[FailedRank]) -> FailedRank | None:
    """The earliest failure of a rank that is no victim and that we did not end; failing that, the earliest."""
    own = [f for f in failed if f.exit.signalled_at is None or f.began < f.exit.signalled_at]
    candidates = own or list(failed)
    culprits = [f for f in candidates if not f.victim] or candidates
    return min(culprits, key=lambda f: (f.began, f.exit.rank), default=None)


def describe(exit: RankExit, error: UncaughtException | None, label: str) -> str:
    """One sentence that names the rank and how it ended."""
    who = f"rank {exit.rank} ({label}, pid {exit.pid})"
    if error is not None and error.type != "SystemExit":
        name, message = error.type or "error", error.message
        if is_lost_peer(message) and error.root_type:
            name, message = error.root_type, error.root_message or ""
        message = shorten(message.strip().split("\n")[0], _LONGEST, placeholder=" …")
        return f"{who} failed with {name}: {message}" if message else f"{who} failed with {name}"
    if exit.signal is not None:
        return f"{who} was killed by {signal_name(exit.signal)}"
    return f"{who} exited with code {exit.code}"


def signal_name(number: int) -> str:
    """SIGKILL for 9; a number where it has no name (real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


__all__ = [
    "CLEAN_CODES",
    "EXIT_CODE_OF_A_HANG",
    "EXIT_STOPPED_AND_SAVED",
    "FailedRank",
    "RankExit",
    "describe",
    "first_failure",
    "read_error",
    "signal_name",
    "weigh",
]
