"""What others may add to the supervision of a job, and what comes out of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from model_check.record import RunDir
from model_check.record.journal import Journal
from model_check.record.rank_exits import FailedRank, RankExit


@dataclass(frozen=True)
class JobView:
    """What a hook may know of the running job; what it finds out goes into the journal."""

    run_dir: RunDir
    attempt: int
    pids: dict[int, int]
    running: tuple[int, ...]
    started_at: float
    journal: Journal


@dataclass(frozen=True)
class EndJob:
    """A hook's answer: end the job now, for this reason, with this exit code."""

    reason: str
    exit_code: int


@dataclass(frozen=True)
class Hooks:
    """What others add to the supervision. `on_poll` comes ten times a second while ranks run, so it must be quick."""

    on_start: Callable[[JobView], None] | None = None
    on_poll: Callable[[JobView], EndJob | None] | None = None
    on_exit: Callable[[RankExit], None] | None = None
    on_trouble: Callable[[str], None] | None = None  # something of ours failed; the job goes on


@dataclass(frozen=True)
class Graces:
    """Seconds between SIGTERM and SIGKILL: after a request to stop (ranks may save), and after a rank's failure.

    lost_s: what is left of `stop_s` at most once a rank fails while it lasts: the others can only wait for it.
    busy_s: after a rank's failure, for ranks that handle SIGTERM and are at work: they may be saving.
    """

    stop_s: float = 10.0
    lost_s: float = 10.0
    failure_s: float = 1.0
    busy_s: float = 0.0


class JobStopped(Exception):
    """All ranks are gone because somebody asked for it."""


class JobEnded(Exception):
    """All ranks are gone because a hook decided it."""

    def __init__(self, order: EndJob) -> None:
        super().__init__(order.reason)
        self.order = order


@dataclass
class Outcome:
    """What the agent learnt, for whoever runs it."""

    exits: list[RankExit] = field(default_factory=list)
    failure: FailedRank | None = None
