"""Follows one rank's ring: every record is looked at once, and what the rules need of it is kept.

A ring holds thousands of records and is examined every second or so. Kept are the newest records, those of the start,
everything still open, and a log of the collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model_check.diagnose.issues import Issue, MessageKey, is_issue
from model_check.record.ring import FLAG_NATIVE, REDUCES_BY, UNIT, Crumb, RingTail
from model_check.record.stacks import Frame

_RECENT = 2048
_EARLY = 512
_ISSUES = 1024
_REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
_EARLY_PHASES = frozenset({"import", "init", "hub", "tracker"})
# The phases that give a collective its place within a step.
_CONTEXT_PHASES = frozenset({"data", "forward", "backward", "optimizer", "step", "save", "load", "eval"})


def _reduction(crumb: Crumb) -> str:
    """By which operation a call reduces, where its record says so: the first one of a group names the members there."""
    if crumb.op not in _REDUCING or crumb.flags & FLAG_NATIVE or crumb.detail.endswith("?"):
        return ""
    return (
        crumb.detail.removeprefix(REDUCES_BY) if crumb.detail.startswith(REDUCES_BY) else "" if crumb.detail else "sum"
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
            elif crumb.phase == "p2p" and crumb.event != "end" and crumb.detail != "wait":
                key = (crumb.op, crumb.peer, crumb.group)
                self.messages[key] = max(self.messages.get(key, 0), crumb.collective_seq)

    def _close(self, crumb: Crumb) -> None:
        begin = self._open.pop(crumb.span, None)
        if begin is not None and is_issue(begin) and not crumb.detail.startswith("raised"):
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
            reduction=_reduction(crumb),
            unit=crumb.detail.removeprefix(UNIT) if crumb.detail.startswith(UNIT) else "",
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

    def read(self) -> dict[str, Any]:
        """Reads on, and returns the ring's header as it is now; empty where there is no ring."""
        header = self._tail.header
        if not header:
            return {}
        fresh = self._tail.poll()
        if self._tail.generation != self._generation:
            self._generation = self._tail.generation
            self.log = RankLog(self._rank)
        self.log.feed(fresh, str(header.get("cwd") or ""))
        return header
