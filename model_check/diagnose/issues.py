"""What every rank issued in every group: the collectives of the rings (and of the flight recorder) in order.

A ring holds thousands of records and is examined every second or so, so every record is looked at once: kept are the
newest, those of the start, everything still open, and a log of the collectives.

Collectives of one group are matched by their sequence number. A rank that has not issued a number yet is behind, not
wrong; numbers that a wrapped ring no longer holds are never compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from model_check.diagnose.evidence import P2P_OPS, Evidence
from model_check.diagnose.source import statement
from model_check.record.flight import FlightEntry
from model_check.record.ring import FLAG_NATIVE, Crumb, RingHeader, RingTail
from model_check.record.stacks import Frame

Key = tuple[str, str]  # (operation, call site)
MessageKey = tuple[str, int, str]  # (send or recv, peer, group)
_NONE_RETURNED: frozenset[int] = frozenset()
_RECENT = 2048
_EARLY = 512
_ISSUES = 1024
_EARLY_PHASES = frozenset({"import", "init", "hub", "tracker"})
# The phases that give a collective its place within a step.
_CONTEXT_PHASES = frozenset({"data", "forward", "backward", "optimizer", "step", "save", "load", "eval"})
# Operations with one source or destination, which all ranks must name alike.
ROOTED_OPS = frozenset(
    {"broadcast", "reduce", "gather", "scatter", "broadcast_object", "gather_object", "scatter_object"}
)


@dataclass(frozen=True)
class Issue:
    """One collective as one rank called it."""

    rank: int
    group: str
    seq: int
    op: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    frame: Frame | None
    step: int = -1
    t: float = 0.0
    context: str = ""
    native: bool = False
    peer: int = -1
    thread: int = 0  # native id; 0 where it is not known
    unit: str = ""  # the module whose parameters it gathers, if FSDP names it
    reduction: str = ""  # sum, max, …; empty where the call reduces nothing, or it is not known

    @property
    def site(self) -> str:
        return self.frame.site if self.frame is not None else ""

    @property
    def root(self) -> int:
        """The global rank that sends or receives for all; -1 where the operation has none, or it is not known."""
        return self.peer if self.op in ROOTED_OPS else -1

    @property
    def key(self) -> Key:
        return (self.op, f"{self.site} for {self.unit}" if self.unit else self.site)

    @cached_property
    def text_key(self) -> Key:
        """The call by its source text: the same statement in two branches of an `if rank` is the same call."""
        text = statement(self.frame) if self.frame is not None else ""
        return (self.op, f"{text or self.site} for {self.unit}" if self.unit else text or self.site)

    def describe(self) -> str:
        """all_reduce of float32[64, 64] at train.py:40; broadcast of float32[4], root 0, at train.py:41"""
        shape = f"[{', '.join(map(str, self.shape))}]" if self.shape else ""
        what = f"{self.op} of {self.dtype}{shape}" if self.dtype not in ("none", "") else self.op
        if self.op == "broadcast_object" and self.shape:
            what += f" of {self.shape[0]} object{'s' if self.shape[0] != 1 else ''}"
        what += f" by {self.reduction}" if self.reduction not in ("", "sum") else ""
        what += f", root {self.root}," if self.root >= 0 else ""
        where = f" at {self.site}" if self.site else ""
        where += f" for {self.unit}" if self.unit else ""
        inside = " (started by DDP or FSDP)" if self.native else ""
        return f"{what}{where}{inside}"


@dataclass(frozen=True)
class GroupTable:
    """The issues of one group: rank -> sequence number -> issue, and the numbers that came back without an error."""

    group: str
    members: tuple[int, ...]
    issues: Mapping[int, Mapping[int, Issue]]
    returned: Mapping[int, Set[int]]
    known: frozenset[int]  # members whose record is complete enough to say what they have not done
    equal_gathers: bool = False  # the backend cannot gather tensors of different sizes

    @cached_property
    def _highest(self) -> dict[int, int]:
        return {rank: max(table, default=0) for rank, table in self.issues.items()}

    def highest(self, rank: int) -> int:
        return self._highest.get(rank, 0)

    def at(self, seq: int) -> dict[int, Issue]:
        return {rank: table[seq] for rank, table in self.issues.items() if seq in table}

    def came_back(self, issue: Issue) -> bool:
        return issue.seq in self.returned.get(issue.rank, _NONE_RETURNED)

    def passed(self, issue: Issue) -> bool:
        """The rank came back from this collective and went on to issue another one in the group."""
        return self.came_back(issue) and self.highest(issue.rank) > issue.seq

    def completed(self, issue: Issue) -> bool:
        """The call did its work, as far as can be known: one that C++ makes comes back as soon as it is issued."""
        return self.passed(issue) if issue.native else self.came_back(issue)

    def history(self, rank: int, before: int) -> list[Issue]:
        return [issue for seq, issue in self.issues.get(rank, {}).items() if seq < before]

    def missing(self, seq: int) -> list[int]:
        """Members that have not issued this number, as far as can be known."""
        return [rank for rank in self.members if rank in self.known and self.highest(rank) < seq]

    def settled(self) -> int:
        """The highest number that every member with a record has issued."""
        return min((self.highest(rank) for rank in self.members if rank in self.known), default=0)

    def shared_sequences(self, start: int = 0) -> list[int]:
        """Numbers from `start` on that at least two ranks still hold, in order."""
        seen: set[int] = set()
        shared: set[int] = set()
        for table in self.issues.values():
            numbers = {seq for seq in table if seq >= start}
            shared |= seen & numbers
            seen |= numbers
        return sorted(shared)


def is_issue(crumb: Crumb) -> bool:
    """Whether this record is the start of a collective (not of waiting for one, not point-to-point)."""
    return (
        crumb.collective_seq > 0
        and crumb.event != "end"
        and crumb.phase != "p2p"
        and crumb.op not in P2P_OPS
        and not crumb.is_wait
    )


class RankLog:
    """What is known of one rank from its records so far."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.complete = True  # no record was overwritten before it was seen
        self.issues: dict[str, dict[int, Issue]] = {}
        self.returned: dict[str, set[int]] = {}
        self.messages: dict[MessageKey, int] = {}
        self._recent: deque[Crumb] = deque(maxlen=_RECENT)
        self._early: list[Crumb] = []
        self._open: dict[int, Crumb] = {}
        self._context = ""
        self._next_seq = 1
        self.first_step_t: float | None = None  # None: no step yet, or the first one was lost

    def feed(self, crumbs: Iterable[Crumb], root: str = "") -> None:
        """Takes in new records; `root` is the folder that relative paths of the rank start from."""
        for crumb in crumbs:
            if crumb.seq > self._next_seq:
                self.complete = False
            self._next_seq = crumb.seq + 1
            self._recent.append(crumb)
            if self.first_step_t is None and self.complete and crumb.event == "point" and crumb.phase == "step":
                self.first_step_t = crumb.time_ns / 1e9
            if crumb.phase in _EARLY_PHASES and len(self._early) < _EARLY:
                self._early.append(crumb)
            if crumb.phase in _CONTEXT_PHASES:
                self._context = f"{crumb.phase}:{crumb.event}"
            if crumb.event == "begin":
                self._open[crumb.seq] = crumb
            elif crumb.event == "end":
                self._close(crumb)
            if is_issue(crumb):
                self._issue(crumb, root)
            elif crumb.phase == "p2p" and crumb.event != "end" and not crumb.is_wait:
                key = (crumb.op, crumb.peer, crumb.group)
                self.messages[key] = max(self.messages.get(key, 0), crumb.collective_seq)

    def _close(self, crumb: Crumb) -> None:
        begin = self._open.pop(crumb.span, None)
        if begin is not None and is_issue(begin) and not crumb.raised:
            self.returned[begin.group].add(begin.collective_seq)

    def _issue(self, crumb: Crumb, root: str) -> None:
        issues = self.issues.setdefault(crumb.group, {})
        returned = self.returned.setdefault(crumb.group, set())
        issues[crumb.collective_seq] = Issue(
            rank=self.rank,
            group=crumb.group,
            seq=crumb.collective_seq,
            op=crumb.op,
            dtype=crumb.dtype,
            shape=crumb.shape,
            bytes=crumb.bytes,
            frame=Frame(crumb.file, crumb.line, crumb.function, root=root) if crumb.file else None,
            step=crumb.step,
            t=crumb.time_ns / 1e9,
            context=self._context,
            native=bool(crumb.flags & FLAG_NATIVE),
            peer=crumb.peer,
            thread=crumb.thread,
            reduction=crumb.reduction,
            unit=crumb.unit,
        )
        if len(issues) > _ISSUES:
            oldest = next(iter(issues))
            del issues[oldest]
            returned.discard(oldest)

    def crumbs(self) -> tuple[Crumb, ...]:
        """The records kept, oldest first."""
        first = self._recent[0].seq if self._recent else 0
        older = {c.seq: c for c in (*self._early, *self._open.values()) if c.seq < first}
        return (*(older[seq] for seq in sorted(older)), *self._recent)


class FollowedRing:
    """One ring file; a rank that restarts begins a new log."""

    def __init__(self, path: Path, rank: int) -> None:
        self._tail = RingTail(path)
        self._generation = 0
        self._rank = rank
        self.log = RankLog(rank)

    def read(self) -> RingHeader:
        """Reads on, and returns the ring's header as it is now; False where there is no ring."""
        header = self._tail.header
        if not header:
            return header
        fresh = self._tail.poll()
        if self._tail.generation != self._generation:
            self._generation = self._tail.generation
            self.log = RankLog(self._rank)
        self.log.feed(fresh, header.cwd)
        return header


def group_tables(evidence: Evidence) -> list[GroupTable]:
    """One table per group, from the rings."""
    groups: dict[str, dict[int, Mapping[int, Issue]]] = {}
    returned: dict[str, dict[int, Set[int]]] = {}
    for rank in evidence.ranks.values():
        for name, issues in rank.issues.items():
            groups.setdefault(name, {})[rank.rank] = issues
            returned.setdefault(name, {})[rank.rank] = rank.returned.get(name, _NONE_RETURNED)
    tables = []
    for name, by_rank in groups.items():
        members = evidence.group_members(name)
        known = frozenset(r for r in members if r in by_rank or (evidence.of(r).header and evidence.of(r).complete))
        gloo = all(evidence.of(rank).header.backend == "gloo" for rank in by_rank)
        tables.append(GroupTable(name, members, by_rank, returned[name], known, equal_gathers=gloo))
    return tables


def flight_tables(evidence: Evidence) -> list[GroupTable]:
    """One table per process group of the flight recorder's dumps."""
    groups: dict[str, dict[int, dict[int, Issue]]] = {}
    returned: dict[str, dict[int, set[int]]] = {}
    for rank in evidence.ranks.values():
        for entry in rank.flight:
            issue = _from_flight(rank.rank, entry)
            groups.setdefault(entry.group, {}).setdefault(rank.rank, {})[issue.seq] = issue
            back = returned.setdefault(entry.group, {}).setdefault(rank.rank, set())
            if not entry.in_flight:
                back.add(issue.seq)
    return [
        GroupTable(f"process group {name}", tuple(sorted(issues)), issues, returned[name], frozenset())
        for name, issues in groups.items()
        if len(issues) > 1
    ]


def _from_flight(rank: int, entry: FlightEntry) -> Issue:
    return Issue(
        rank=rank,
        group=entry.group,
        seq=entry.collective_seq_id,
        # NCCL makes a barrier of an all_reduce, and its recorder shows that.
        op="all_reduce" if entry.op == "barrier" else entry.op,
        dtype=entry.dtypes[0] if entry.dtypes else "none",
        shape=entry.input_sizes[0] if len(entry.input_sizes) == 1 else (),
        bytes=0,
        frame=entry.user_frame,
        native=True,
    )
