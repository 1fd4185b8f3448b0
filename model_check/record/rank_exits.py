"""Which rank failed first, and which ones only lost a peer.

A rank that dies closes its connections, and its peers fail a moment later with an error of their own. Those are
victims: a victim is never the first failure while another rank has an error that is not about a lost peer.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from model_check.record import RunDir, read_json, read_jsonl

EXIT_STOPPED_AND_SAVED = 75
CLEAN_CODES = (0, EXIT_STOPPED_AND_SAVED)

_LOST_PEER = re.compile(
    r"""connection\ (closed|reset|refused|was\ aborted|aborted)
    | connection\ was\ (closed|reset)
    | closed\ by\ (the\ )?(remote\ )?peer
    | broken\ pipe
    | application\ timeout\ caused\ pair\ closure
    | remote\ process\ exited
    | ncclRemoteError
    | NCCL\ communicator\ was\ aborted
    | collective\ operation\ timeout
    | timed\ out\ waiting\ .{0,80}\ (recv|send)\ operation
    | connectFullMesh\ failed
    | failed\ to\ recv,\ got\ 0\ bytes
    | recvValue\ failed
    | DistNetworkError | DistStoreError
    """,
    re.IGNORECASE | re.VERBOSE,
)
_LOG_TAIL_BYTES = 1 << 16
_LONGEST = 200  # of a message on the launcher's own line; the log and the verdict have the whole of it


@dataclass(frozen=True)
class RankExit:
    """How a rank ended: with a `code` or by a `signal`. `signalled_at`: when we told it to end, if we did."""

    rank: int
    pid: int
    code: int | None
    signal: int | None
    at_monotonic: float
    attempt: int
    signalled_at: float | None = None

    @property
    def failed(self) -> bool:
        return self.code not in CLEAN_CODES

    @property
    def failed_by_itself(self) -> bool:
        """It failed, and not because it was asked to stop."""
        return self.failed and self.exit_code != 128 + signal.SIGTERM

    @property
    def exit_code(self) -> int:
        """As a shell reports it: the code, or 128 + the signal."""
        return self.code if self.code is not None else 128 + (self.signal or 0)


@dataclass(frozen=True)
class FailedRank:
    """A failed rank with what is known of why."""

    exit: RankExit
    error: dict[str, Any] | None
    victim: bool
    at_monotonic: float


def is_lost_peer(text: str) -> bool:
    """Whether an error text says only that another rank went away."""
    return _LOST_PEER.search(text) is not None


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
    if error is not None:
        said = f"{error.get('root_type', error['type'])}: {error.get('root_message', error['message'])}"
        began = min(float(error.get("t", exit.at_monotonic)), exit.at_monotonic)
    else:
        said = _last_words(exit, log)
        began = exit.at_monotonic
    return FailedRank(exit, error, is_lost_peer(said), began)


def _last_words(exit: RankExit, log: Path) -> str:
    """What the log says of a death without a record: an abort explains itself above its stack, a script last."""
    if exit.signal != signal.SIGABRT and exit.code != 1:
        return ""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            tail = file.read().decode("utf-8", "replace").rstrip()
    except FileNotFoundError:
        return ""
    return tail if exit.signal == signal.SIGABRT else tail.rpartition("\n")[2]


def first_failure(failed: Sequence[FailedRank]) -> FailedRank | None:
    """The earliest failure of a rank that is no victim and that we did not end; failing that, the earliest."""
    own = [f for f in failed if f.exit.signalled_at is None or f.at_monotonic < f.exit.signalled_at]
    candidates = own or list(failed)
    culprits = [f for f in candidates if not f.victim] or candidates
    return min(culprits, key=lambda f: (f.at_monotonic, f.exit.rank), default=None)


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
