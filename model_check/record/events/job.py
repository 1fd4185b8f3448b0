"""Events of the launcher about its ranks: starts, exits, signals, restarts, limits."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass, field

from model_check.record.events.base import Event
from model_check.record.typed import NULL_TOO

EXIT_STOPPED_AND_SAVED = 75
CLEAN_CODES = (0, EXIT_STOPPED_AND_SAVED)


@dataclass(frozen=True, kw_only=True)
class RankStarted(Event, kind="rank_started"):
    """The process of a rank runs."""

    rank: int = -1
    attempt: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankExit(Event, kind="rank_exited"):
    """How a rank ended: with a `code` or by a `signal`. Both are None if we only know that it is gone."""

    rank: int = -1
    attempt: int = 0
    code: int | None = field(default=None, metadata=NULL_TOO)
    signal: int | None = field(default=None, metadata=NULL_TOO)
    signalled_at: float | None = None  # when we told it to end, if we did; CLOCK_MONOTONIC seconds

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
        return self.failed and self.exit_code != 128 + signals.SIGTERM

    @property
    def exit_code(self) -> int:
        """As a shell reports it: the code, or 128 + the signal, assumed to be SIGKILL if unknown."""
        return self.code if self.code is not None else 128 + (self.signal or signals.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class SignalSent(Event, kind="signal_sent"):
    """The launcher told a rank something."""

    rank: int = -1
    signal: str = ""  # its name
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event, kind="stop_requested"):
    """A person, or a batch system, asked the launcher to stop."""

    signal: str = ""  # its name


@dataclass(frozen=True, kw_only=True)
class EndedByHook(Event, kind="ended_by_hook"):
    """The supervisor had the job ended."""

    reason: str = ""  # a sentence


@dataclass(frozen=True, kw_only=True)
class Restart(Event, kind="restart"):
    """All ranks are started again after a failure."""

    attempt: int = 0
    max_restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class ColdStart(Event, kind="cold_start"):
    """The ranks could not share what the launcher had imported."""

    reason: str = ""  # a sentence


@dataclass(frozen=True, kw_only=True)
class OldLogsRemoved(Event, kind="old_logs_removed"):
    """Logs of earlier jobs had to make room."""

    folders: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AddressSpaceLimit(Event, kind="address_space_limit"):
    """The kernel limits the address space of each rank."""

    gb: float = 0.0  # GiB
