"""Who waits for whom, in one sentence: "rank 0 has been saving a checkpoint for 31 s; 7 ranks wait for it".

Reads the rings' open spans. This is for the line in the terminal while a job is slow; naming a fault is the work of
the rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from model_check.record import RunDir
from model_check.record.ring import DOING, FLAG_ASYNC, WAIT_PHASES, RingReading, read_ring
from model_check.record.start_marks import read_start_marks, who_is_where

# A process that sleeps for minutes in one of these is stuck, even where no other rank waits for it.
NEVER_IDLE_PHASES = frozenset({"data", "save", "load", "hub", "tracker", "input"})
_DEFAULT_GROUP = "default"

_PASSES = frozenset({"forward", "backward", "optimizer"})
_NEWEST_PASSES = 8  # newest records of passes to look at
_DOES = {
    "data": "loads data",
    "save": "saves a checkpoint",
    "load": "loads a checkpoint",
    "compile": "compiles",
    "model": "builds the model",
    "eval": "evaluates",
}


@dataclass(frozen=True)
class Activity:
    """What a rank is in the middle of, and since when (CLOCK_MONOTONIC seconds)."""

    rank: int
    phase: str
    since: float
    site: str = ""
    op: str = ""
    forwards_only: bool = False  # its newest passes are forwards that no backward follows

    @property
    def waits(self) -> bool:
        """It waits for other ranks."""
        return self.phase in WAIT_PHASES


def activities(run_dir: RunDir, since_start: Mapping[int, float]) -> list[Activity]:
    """Where each of the given ranks stands. A rank outside any span, or without a ring, is in code of its own."""
    readings = {rank: read_ring(run_dir.ring(rank)) for rank in since_start}
    return [
        _in_flight(rank, readings) or _activity(rank, reading, since_start[rank]) for rank, reading in readings.items()
    ]


def _forwards_only(reading: RingReading) -> bool:
    passes = [crumb.phase for crumb in reading.crumbs if crumb.phase in _PASSES][-_NEWEST_PASSES:]
    return len(passes) == _NEWEST_PASSES and set(passes) == {"forward"}


def _activity(rank: int, reading: RingReading, started_at: float) -> Activity:
    open_spans = [crumb for crumb in reading.open_spans() if crumb.thread == (reading.header.pid or crumb.thread)]
    if open_spans:
        inner = open_spans[-1]
        op = inner.op if inner.op != "none" else ""
        return Activity(rank, inner.phase, inner.time_ns / 1e9, inner.site, op, _forwards_only(reading))
    last = reading.crumbs[-1] if reading.crumbs else None
    since = last.time_ns / 1e9 if last else started_at
    phase = "none" if reading.header else "start"
    return Activity(rank, phase, since, last.site if last else "", forwards_only=_forwards_only(reading))


def _in_flight(rank: int, readings: Mapping[int, RingReading]) -> Activity | None:
    """A rank whose last act was to start a collective (DDP does so from C++) that a peer has not started yet."""
    last = next((crumb for crumb in reversed(readings[rank].crumbs) if crumb.event == "begin"), None)
    if last is None or not last.flags & FLAG_ASYNC or last.collective_seq <= 0 or last.phase == "p2p":
        return None
    started = [_started(reading, last.group) for peer, reading in readings.items() if peer != rank]
    if not any(seq < last.collective_seq for seq in started if seq is not None):
        return None
    return Activity(rank, last.phase, last.time_ns / 1e9, last.site, last.op)


def _started(reading: RingReading, group: str) -> int | None:
    """The number of the newest collective in the group; None for a rank that is not known to be a member."""
    numbers = (crumb.collective_seq for crumb in reversed(reading.crumbs) if crumb.group == group)
    return next(numbers, 0 if group == _DEFAULT_GROUP else None)


def waiting_line(where: Sequence[Activity], now: float) -> str | None:
    """The sentence, or None where nobody is known to wait for anybody."""
    waiting = [activity for activity in where if activity.waits]
    working = [activity for activity in where if not activity.waits]
    if not where:
        return None
    if working:
        groups: dict[str, list[Activity]] = defaultdict(list)
        for activity in working:
            groups[activity.phase].append(activity)
        phase, slowest = min(groups.items(), key=lambda item: min(s.since for s in item[1]))
        doing = DOING.get(phase) or "in its own code" + (f" after {slowest[0].site}" if slowest[0].site else "")
        seconds = now - min(s.since for s in slowest)
        sentence = f"{name_ranks([s.rank for s in slowest])} been {doing} for {seconds:.0f} s"
        if not waiting:
            return sentence
        it = "it" if len(slowest) == 1 else "them"
        return f"{sentence}; {len(waiting)} rank{'s wait' if len(waiting) > 1 else ' waits'} for {it}"
    places: dict[str, list[int]] = defaultdict(list)
    for activity in waiting:
        places[f"{activity.op or activity.phase} at {activity.site}" if activity.site else activity.phase].append(
            activity.rank
        )
    seconds = now - max(s.since for s in waiting)
    who = "; ".join(f"rank{'s' if len(ranks) > 1 else ''} {_list(ranks)} in {place}" for place, ranks in places.items())
    return f"every rank has been waiting for another for {seconds:.0f} s: {who}"


def work_line(working: Sequence[Activity], waiting: int) -> str:
    """Says that some ranks work while others wait for them: "rank 0 evaluates; 3 ranks wait for it"."""
    first = min(working, key=lambda activity: activity.rank)
    does = "evaluates" if first.forwards_only else _DOES.get(first.phase, "is at work")
    others = f" (and {len(working) - 1} more)" if len(working) > 1 else ""
    return waits_for_it(f"rank {first.rank}{others} {does}", waiting)


def waits_for_it(doing: str, waiting: int) -> str:
    return f"{doing}; {waiting} rank{'s wait' if waiting > 1 else ' waits'} for it" if waiting else doing


def start_line(run_dir: RunDir, ranks: Collection[int], now: float) -> str | None:
    """Where a start that is not over stands, by the checkpoints the ranks have passed; None for any other job."""
    return who_is_where({rank: passed for rank, passed in read_start_marks(run_dir).items() if rank in ranks}, now)


def name_ranks(ranks: Sequence[int]) -> str:
    """The subject of a sentence in the perfect tense: `rank 3 has`, `ranks 0, 2 have`."""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {_list(ranks)} have"


def _list(ranks: Sequence[int]) -> str:
    if len(ranks) > 6:
        return f"{', '.join(map(str, ranks[:5]))} and {len(ranks) - 5} more"
    return ", ".join(map(str, ranks))
