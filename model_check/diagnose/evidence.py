"""Evidence: everything a run directory says about a run, as frozen data that rules read and never change."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from model_check.record.events import Event
from model_check.record.events.crashes import Exit, UncaughtException
from model_check.record.events.job import RankExit, SignalSent
from model_check.record.events.process import (
    GroupJoined,
    JobOver,
    JobStarted,
    Stalled,
    StallWithdrawn,
    Stopped,
    StopReason,
    Versions,
)
from model_check.record.flight import FlightEntry
from model_check.record.metrics import StepMetrics
from model_check.record.process_sample import RankSample
from model_check.record.ring import WAIT_PHASES as WAIT_PHASES
from model_check.record.ring import Crumb, RingHeader
from model_check.record.run_plan import RunPlan
from model_check.record.stacks import Frame, ProcessStacks
from model_check.record.stalls import STALL_FLOOR_S, stall_after_s
from model_check.record.verdict import Outcome

if TYPE_CHECKING:
    from model_check.diagnose.issues import Issue, MessageKey

E = TypeVar("E", bound=Event)
_CLOCK_SLACK_S = 0.05
POLLING_PHASES = frozenset({"store", "gate"})
NEWEST_RECORDS = 64
P2P_OPS = frozenset({"send", "recv", "batch_p2p"})


@dataclass(frozen=True)
class RankEvidence:
    """Everything known about one rank."""

    rank: int
    header: RingHeader = field(default_factory=RingHeader)
    crumbs: tuple[Crumb, ...] = ()
    told: tuple[Event, ...] = ()
    stacks: tuple[ProcessStacks, ...] = ()
    samples: tuple[RankSample, ...] = ()
    flight: tuple[FlightEntry, ...] = ()
    fault_frames: tuple[Frame, ...] = ()
    exit: RankExit | None = None
    started_t: float | None = None
    log_tail: str = ""
    issues: Mapping[str, Mapping[int, Issue]] = field(default_factory=dict)
    returned: Mapping[str, Set[int]] = field(default_factory=dict)
    messages: Mapping[MessageKey, int] = field(default_factory=dict)
    complete: bool = True  # no record of the ring was lost before it was read
    first_step_t: float | None = None  # None: no step yet, or its record was lost

    @property
    def pid(self) -> int:
        return self.header.pid or (self.samples[-1].pid if self.samples else 0)

    @property
    def cwd(self) -> str:
        """The folder the rank ran in: relative paths start there."""
        return self.header.cwd

    @property
    def alive(self) -> bool:
        return self.exit is None

    @property
    def seen(self) -> bool:
        """False: nothing but its number is known, e.g. it was never started or left no files."""
        return bool(self.header or self.samples or self.exit or self.told or self.started_t is not None)

    @cached_property
    def main_thread(self) -> int:
        threads = {crumb.thread for crumb in self.crumbs}
        if self.pid in threads or not self.crumbs:
            return self.pid
        return self.crumbs[0].thread

    @cached_property
    def open_spans(self) -> tuple[Crumb, ...]:
        """Everything begun and not ended, oldest first, on any thread."""
        ended = {crumb.span for crumb in self.crumbs if crumb.event == "end"}
        return tuple(c for c in self.crumbs if c.event == "begin" and c.seq not in ended)

    @cached_property
    def innermost(self) -> Crumb | None:
        """What the main thread was in the middle of."""
        return next((c for c in reversed(self.open_spans) if c.thread == self.main_thread), None)

    @cached_property
    def blocking(self) -> Crumb | None:
        """The open span in which this rank waits for others: a collective, a receive, joining the group."""
        crumb = self.innermost
        if crumb is not None and crumb.phase in WAIT_PHASES and (crumb.is_wait or not crumb.is_async):
            return crumb
        return None

    @cached_property
    def last_crumb(self) -> Crumb | None:
        return self.crumbs[-1] if self.crumbs else None

    @cached_property
    def last_progress_t(self) -> float | None:
        """The time of the last record, in seconds of CLOCK_MONOTONIC."""
        if self.crumbs:
            return self.crumbs[-1].time_ns / 1e9
        start = self.header.start_monotonic_ns
        return start / 1e9 if start else self.started_t

    @cached_property
    def step(self) -> int | None:
        """The 0-based step in progress, as far as the ring tells."""
        return self.last_crumb.step if self.last_crumb is not None and self.last_crumb.step >= 0 else None

    @cached_property
    def step_times(self) -> tuple[float, ...]:
        return tuple(c.time_ns / 1e9 for c in self.crumbs if c.event == "point" and c.phase == "step")

    @cached_property
    def joined(self) -> bool:
        """It has been through init_process_group, or says that it is past it."""
        if any(isinstance(event, (GroupJoined, Versions)) for event in self.told):
            return True
        return any(
            c.phase in ("collective", "barrier", "p2p") or (c.phase == "init" and c.event == "end") for c in self.crumbs
        )

    def happened(self, kind: type[E]) -> list[E]:
        """The events of this kind, oldest first."""
        return [event for event in self.told if isinstance(event, kind)]

    @cached_property
    def exceptions(self) -> list[UncaughtException]:
        return self.happened(UncaughtException)

    @cached_property
    def announced_exit(self) -> Exit:
        """How it said that it leaves, the last time; an empty event where it said nothing."""
        return [Exit(), *self.happened(Exit)][-1]

    def rank_stacks(self) -> list[ProcessStacks]:
        """Rounds of this rank's own process that could be taken, oldest first."""
        return [s for s in self.stacks if s.process == "rank" and s.threads]

    def last_site(self) -> Frame | None:
        if self.innermost is not None and self.innermost.file:
            return frame_of(self.innermost, self.cwd)
        crumb = next((c for c in reversed(self.crumbs) if c.file), None)
        return frame_of(crumb, self.cwd) if crumb is not None else None


@dataclass(frozen=True)
class Evidence:
    """One run: all its ranks, what the launcher saw, and what could not be read."""

    world_size: int
    ranks: Mapping[int, RankEvidence]
    journal: tuple[Event, ...] = ()  # the launcher's events
    now: float = 0.0
    live: bool = False
    cores: int | None = None
    host_memory: int | None = None  # bytes that the host had to give when the job began
    damage: tuple[str, ...] = ()
    metrics: tuple[StepMetrics, ...] = ()  # of our own trainer: the first steps and the newest
    vocabulary: int | None = None  # of our own trainer's model
    ours: bool = False  # a run of our own trainer: the reader has our settings and no script
    plan: RunPlan = field(default_factory=RunPlan)  # of our own trainer on GPUs: what a rank was to need

    def of(self, rank: int) -> RankEvidence:
        return self.ranks.get(rank) or RankEvidence(rank)

    @cached_property
    def all_ranks(self) -> list[int]:
        return sorted(set(range(self.world_size)) | set(self.ranks))

    def said(self, kind: type[E]) -> list[E]:
        """The launcher's events of this kind, oldest first."""
        return [event for event in self.journal if isinstance(event, kind)]

    @cached_property
    def stall(self) -> Stalled | None:
        """The launcher's standing claim that nothing moves, unless it was withdrawn or the job began anew."""
        standing: Stalled | None = None
        for event in self.journal:
            if isinstance(event, Stalled):
                standing = event
            elif isinstance(event, (StallWithdrawn, JobStarted)):
                standing = None
        return standing

    @cached_property
    def stopped(self) -> StopReason | None:
        """Why the launcher ended the job; None if it did not."""
        stops = self.said(Stopped)
        return stops[-1].because if stops else None

    @property
    def killed_as_hung(self) -> bool:
        return self.stopped == "hang"

    @cached_property
    def median_step_s(self) -> float | None:
        gaps = [b - a for r in self.ranks.values() for a, b in pairwise(r.step_times)]
        return statistics.median(gaps) if gaps else None

    @cached_property
    def stall_threshold_s(self) -> float:
        median = self.median_step_s
        return stall_after_s(median) if median is not None else 2 * STALL_FLOOR_S

    @cached_property
    def end_t(self) -> float:
        """The moment the ranks stopped being left alone: the first exit, or now."""
        exits = [r.exit.t for r in self.ranks.values() if r.exit is not None]
        return min([*exits, self.now])

    @cached_property
    def signals_sent(self) -> dict[int, float]:
        """When the launcher first told a rank to end."""
        return {sent.rank: sent.t for sent in reversed(self.said(SignalSent))}

    def stands(self, rank: int) -> bool:
        """It lives, or lived until the launcher ended it."""
        return self.of(rank).exit is None or self.ended_by_us(rank)

    def ended_by_us(self, rank: int) -> bool:
        """It ended after the launcher had told it to."""
        end = self.of(rank).exit
        return end is not None and rank in self.signals_sent and end.t >= self.signals_sent[rank] - _CLOCK_SLACK_S

    @cached_property
    def ended(self) -> tuple[Outcome, int] | None:
        """The outcome and exit code that the launcher wrote down when all ranks were gone."""
        newest = next((event for event in reversed(self.journal) if isinstance(event, (JobStarted, JobOver))), None)
        if isinstance(newest, JobOver) and newest.outcome is not None and newest.exit_code is not None:
            return newest.outcome, newest.exit_code
        return None

    @property
    def quiet_after_s(self) -> float:
        """How long a rank may go without a record: the launcher's threshold, if any, else one from the step times."""
        said = self.stall.threshold_s if self.stall is not None else 0.0
        return said or self.stall_threshold_s

    def is_quiet(self, rank: int) -> bool:
        since = self.of(rank).last_progress_t
        return since is None or self.now - since >= self.quiet_after_s

    def got_further(self, rank: int) -> bool:
        """Whether the rank has just entered a call or returned from one; polling does not count."""
        newest = (c for c in reversed(self.of(rank).crumbs[-NEWEST_RECORDS:]) if c.phase not in POLLING_PHASES)
        last = next(newest, None)
        return last is not None and self.now - last.time_ns / 1e9 < self.quiet_after_s

    @cached_property
    def stalled(self) -> bool:
        """Whether the job is stalled: as the launcher reports or, if it is dead, by the ages of the open waits.

        The launcher reports a stall before the rings are read, and withdraws it if every rank has gone on since. A job
        without our launcher is judged as of the newest look at it, by the ages of whatever its ranks were doing then.
        """
        if self.stall is not None:
            return not self.live or any(self.is_quiet(rank) for rank in self.all_ranks if self.stands(rank))
        watched = bool(self.said(JobStarted))
        if self.live and watched:
            return False
        look_t = (
            self.now if self.live else max((r.samples[-1].t for r in self.ranks.values() if r.samples), default=0.0)
        )
        if watched or not look_t:
            since = {r.last_progress_t for r in self.ranks.values() if r.blocking is not None}
            look_t = self.end_t
        else:
            since = {r.last_progress_t for r in self.ranks.values() if r.alive and r.innermost is not None}
        return any(t is not None and look_t - t >= self.stall_threshold_s for t in since)

    @cached_property
    def steps_completed(self) -> int:
        """Steps that every rank which made any has completed."""
        done = [count for r in self.ranks.values() if (count := steps_done(r)) > 0]
        return min(done) if done else 0

    def group_members(self, group: str) -> tuple[int, ...]:
        return self._groups.get(group) or tuple(self.all_ranks)

    @cached_property
    def _groups(self) -> dict[str, tuple[int, ...]]:
        groups: dict[str, tuple[int, ...]] = {}
        for rank in self.ranks.values():
            for group in rank.happened(GroupJoined):
                groups[group.name] = tuple(sorted(group.ranks))
            for crumb in rank.crumbs:
                if crumb.group and crumb.group not in groups and crumb.members:
                    groups[crumb.group] = tuple(sorted(crumb.members))
        return groups


def steps_done(rank: RankEvidence) -> int:
    """Every record carries the number of steps completed before it; the mark at a step's end completes one more.

    Of the newest few: another thread's record may be one behind, and a trainer that went back to a checkpoint counts
    from there.
    """
    return max((c.step + (c.phase == "step") for c in rank.crumbs[-8:]), default=0)


def frame_of(crumb: Crumb, root: str = "") -> Frame:
    return Frame(file=crumb.file, line=crumb.line, function=crumb.function, root=root)
