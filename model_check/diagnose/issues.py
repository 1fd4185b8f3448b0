"""What every rank issued in every group: the collectives of the rings (and of the flight recorder) in order.

Collectives of one group are matched by their sequence number. A rank that has not issued a number yet is behind, not
wrong; numbers that a wrapped ring no longer holds are never compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from model_check.diagnose.evidence import P2P_OPS, Evidence, FlightEntry, RankEvidence, is_async
from model_check.diagnose.frames import Frame, source_text
from model_check.rundir.ring import FLAG_NATIVE, Crumb

Key = tuple[str, str]  # (operation, call site)

# The phases that give a collective its place within a step.
_CONTEXT_PHASES = frozenset({"data", "forward", "backward", "optimizer", "step", "save", "load", "eval"})


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
    step: int
    t: float
    context: str
    native: bool
    asynchronous: bool
    ended: bool
    phase: str = "collective"

    @property
    def site(self) -> str:
        return self.frame.site if self.frame is not None else ""

    @property
    def key(self) -> Key:
        return (self.op, self.site)

    @cached_property
    def text_key(self) -> Key:
        """The call by its source text: the same statement in two branches of an `if rank` is the same call."""
        text = source_text(self.frame) if self.frame is not None else ""
        whole = text.count("(") == text.count(")") and "(" in text
        return (self.op, text if whole else self.site)

    def describe(self) -> str:
        """all_reduce of float32[64, 64] at train.py:40 in backward"""
        shape = f"[{', '.join(map(str, self.shape))}]" if self.shape else ""
        what = f"{self.op} of {self.dtype}{shape}" if self.dtype not in ("none", "") else self.op
        where = f" at {self.site}" if self.site else ""
        inside = " (started by DDP or FSDP)" if self.native else ""
        return f"{what}{where}{inside}"


@dataclass(frozen=True)
class GroupTable:
    """The issues of one group: rank -> sequence number -> issue."""

    group: str
    members: tuple[int, ...]
    issues: Mapping[int, Mapping[int, Issue]]
    known: frozenset[int]  # members whose record is complete enough to say what they have not done

    def highest(self, rank: int) -> int:
        return max(self.issues.get(rank, {}), default=0)

    def at(self, seq: int) -> dict[int, Issue]:
        return {rank: table[seq] for rank, table in self.issues.items() if seq in table}

    def history(self, rank: int, before: int) -> list[Issue]:
        return [issue for seq, issue in self.issues.get(rank, {}).items() if seq < before]

    def missing(self, seq: int) -> list[int]:
        """Members that have not issued this number, as far as can be known."""
        return [rank for rank in self.members if rank in self.known and self.highest(rank) < seq]

    @cached_property
    def shared_sequences(self) -> list[int]:
        """Numbers that at least two ranks still hold, in order."""
        counts = Counter(seq for table in self.issues.values() for seq in table)
        return sorted(seq for seq, count in counts.items() if count > 1)


def _issues_of(rank: RankEvidence) -> Iterator[Issue]:
    ended = {crumb.span for crumb in rank.crumbs if crumb.event == "end"}
    context = ""
    for crumb in rank.crumbs:
        if crumb.phase in _CONTEXT_PHASES:
            context = f"{crumb.phase}:{crumb.event}"
        if is_issue(crumb):
            yield Issue(
                rank=rank.rank,
                group=crumb.group,
                seq=crumb.collective_seq,
                op=crumb.op,
                dtype=crumb.dtype,
                shape=crumb.shape,
                bytes=crumb.bytes,
                frame=Frame(crumb.file, crumb.line, crumb.function) if crumb.file else None,
                step=crumb.step,
                t=crumb.time_ns / 1e9,
                context=context,
                native=bool(crumb.flags & FLAG_NATIVE),
                asynchronous=is_async(crumb),
                ended=crumb.seq in ended,
                phase=crumb.phase,
            )


def is_issue(crumb: Crumb) -> bool:
    """Whether this record is the start of a collective (not of waiting for one, not point-to-point)."""
    return (
        crumb.collective_seq > 0
        and crumb.event in ("begin", "point")
        and crumb.phase != "p2p"
        and crumb.op not in P2P_OPS
        and crumb.detail != "wait"
    )


def group_tables(evidence: Evidence) -> list[GroupTable]:
    """One table per group, from the rings."""
    groups: dict[str, dict[int, dict[int, Issue]]] = {}
    for rank in evidence.ranks.values():
        for issue in _issues_of(rank):
            groups.setdefault(issue.group, {}).setdefault(rank.rank, {})[issue.seq] = issue
    tables = []
    for name, issues in groups.items():
        members = evidence.group_members(name)
        known = frozenset(
            rank for rank in members if rank in issues or (evidence.of(rank).header and not _wrapped(evidence.of(rank)))
        )
        tables.append(GroupTable(name, members, issues, known))
    return tables


def _wrapped(rank: RankEvidence) -> bool:
    return bool(rank.crumbs) and rank.crumbs[0].seq > 1


def flight_tables(evidence: Evidence) -> list[GroupTable]:
    """One table per process group of the flight recorder's dumps; a barrier counts as the all_reduce it may be made of."""
    groups: dict[str, dict[int, dict[int, Issue]]] = {}
    for rank in evidence.ranks.values():
        for entry in rank.flight:
            groups.setdefault(entry.group, {}).setdefault(rank.rank, {})[entry.seq] = _from_flight(rank.rank, entry)
    return [
        GroupTable(f"process group {name}", tuple(sorted(issues)), issues, frozenset())
        for name, issues in groups.items()
        if len(issues) > 1
    ]


def _from_flight(rank: int, entry: FlightEntry) -> Issue:
    file, _, line = entry.site.rpartition(":")
    return Issue(
        rank=rank,
        group=entry.group,
        seq=entry.seq,
        op="all_reduce" if entry.op == "barrier" else entry.op,
        dtype=entry.dtypes[0] if entry.dtypes else "none",
        shape=entry.shapes[0] if len(entry.shapes) == 1 else (),
        bytes=0,
        frame=Frame(file, int(line), entry.function) if line.isdigit() else None,
        step=-1,
        t=0.0,
        context="",
        native=True,
        asynchronous=True,
        ended=not entry.in_flight,
    )
