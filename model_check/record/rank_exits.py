"""Which rank failed first, and which ones only lost a peer.

A rank that dies closes its connections, and its peers fail a moment later with an error of their own. Those are
victims: a victim is never the first failure while another rank has an error that is not about a lost peer.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from model_check.record import RunDir, read_json, read_jsonl
from model_check.record.error_texts import is_lost_peer, lost_its_peer
from model_check.record.files import read_tail
from model_check.record.journal import Journal
from model_check.record.values import seconds, whole

EXIT_STOPPED_AND_SAVED = 75
EXIT_CODE_OF_A_HANG = 1  # no rank failed by itself, so none has a code of its own to give
RANK_EXITED = "rank_exited"  # the event in the launcher's journal
CLEAN_CODES = (0, EXIT_STOPPED_AND_SAVED)

_LONGEST = 200  # of a message on the launcher's own line; the log and the verdict have the whole of it


@dataclass(frozen=True)
class RankExit:
    """How a rank ended: with a `code` or by a `signal`. Both are None if we only know that it is gone.

    `signalled_at`: when we told it to end, if we did. Times are CLOCK_MONOTONIC seconds.
    """

    rank: int
    pid: int
    code: int | None
    signal: int | None
    t: float
    attempt: int = 0
    signalled_at: float | None = None

    def write(self, journal: Journal) -> None:
        journal.write(
            RANK_EXITED,
            at_monotonic=self.t,
            rank=self.rank,
            pid=self.pid,
            attempt=self.attempt,
            code=self.code,
            signal=self.signal,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankExit:
        code, number = (said if isinstance(said := value.get(key), int) else None for key in ("code", "signal"))
        if code is not None and code < 0:
            number, code = -code, None  # subprocess's spelling of a signal death
        rank, pid, attempt = (whole(value.get(key)) for key in ("rank", "pid", "attempt"))
        return cls(rank, pid, code, number, seconds(value), attempt)

    @property
    def ok(self) -> bool:
        return self.signal is None and self.code == 0

    @property
    def unknown(self) -> bool:
        return self.code is None and self.signal is None

    @property
    def failed(self) -> bool:
        return self.code not in CLEAN_CODES

    @property
    def failed_by_itself(self) -> bool:
        """It failed, and not because it was asked to stop."""
        return self.failed and self.exit_code != 128 + signal.SIGTERM

    @property
    def exit_code(self) -> int:
        """As a shell reports it: the code, or 128 + the signal, assumed to be SIGKILL if unknown."""
        return self.code if self.code is not None else 128 + (self.signal or signal.SIGKILL)


@dataclass(frozen=True)
class FailedRank:
    """A failed rank, and what is known about the reason."""

    exit: RankExit
    error: dict[str, Any] | None
    victim: bool
    began: float  # when its trouble began


def exits_recorded(run_dir: RunDir) -> list[RankExit]:
    """The exits in the launcher's journal, oldest first."""
    records = read_jsonl(run_dir.supervisor_events).records
    return [RankExit.from_json(record) for record in records if record.get("event") == RANK_EXITED]


def read_error(run_dir: RunDir, exit: RankExit, error_file: Path | None = None) -> dict[str, Any] | None:
    """The first exception this rank recorded in this attempt, or what torch's @record left in its error file."""
    for record in read_jsonl(run_dir.events(exit.rank)).records:
        if record.get("event") == "exception" and record.get("pid") == exit.pid:
            return record
    left = read_json(error_file) if error_file else None
    return _torch_error(left) if isinstance(left, dict) else None


def _torch_error(left: dict[str, Any]) -> dict[str, Any]:
    """torch.distributed.elastic's error file in the shape of our own record."""
    body = left.get("message", left)
    if not isinstance(body, dict):
        return {"type": "", "message": str(body), "traceback": ""}
    kind, _, message = str(body.get("message", "")).partition(": ")
    extra = body.get("extraInfo")
    stack = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    return {"type": kind, "message": message, "traceback": stack}


def weigh(exit: RankExit, error: dict[str, Any] | None, log: Path) -> FailedRank:
    """Decides whether a failed rank is a victim, and when its trouble began."""
    victim = lost_its_peer(error, exit.code, exit.signal, read_tail(log) if error is None else "")
    began = min(float(error.get("t", exit.t)), exit.t) if error else exit.t
    return FailedRank(exit, error, victim, began)


def first_failure(failed: Sequence[FailedRank]) -> FailedRank | None:
    """The earliest failure of a rank that is no victim and that we did not end; failing that, the earliest."""
    own = [f for f in failed if f.exit.signalled_at is None or f.began < f.exit.signalled_at]
    candidates = own or list(failed)
    culprits = [f for f in candidates if not f.victim] or candidates
    return min(culprits, key=lambda f: (f.began, f.exit.rank), default=None)


def describe(exit: RankExit, error: Mapping[str, Any] | None, label: str) -> str:
    """One sentence that names the rank and how it ended."""
    who = f"rank {exit.rank} ({label}, pid {exit.pid})"
    if error is not None and error.get("type") != "SystemExit":
        name, message = str(error.get("type") or "error"), str(error.get("message", ""))
        if is_lost_peer(message) and error.get("root_type"):
            name, message = str(error["root_type"]), str(error.get("root_message", ""))
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
