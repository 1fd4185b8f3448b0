"""Who waits for whom.

A rank in an open collective waits for the members that have not issued it; in a receive, for the matching send; in
init_process_group, for the ranks that have not come. Whoever is waited for and waits for nobody holds the job up.
A circle of firm waits cannot resolve itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from model_check.diagnose.evidence import Evidence, RankEvidence, is_async
from model_check.diagnose.frames import Frame
from model_check.diagnose.issues import GroupTable, is_issue
from model_check.rundir.ring import MEMBERS_ONLY, Crumb

# Phases of the main thread in which an asynchronous collective that was started earlier may be what it waits for.
_MAY_DRAIN = frozenset({"backward", "forward", "optimizer", "step", "eval", "exit"})


@dataclass(frozen=True)
class Wait:
    """One rank's wait. `firm`: the rank's main thread can do nothing else until it ends."""

    rank: int
    kind: Literal["collective", "p2p", "init"]
    on: tuple[int, ...]
    what: str
    frame: Frame | None
    since: float
    firm: bool
    group: str = ""
    seq: int = 0


def find_waits(evidence: Evidence, tables: Iterable[GroupTable]) -> dict[int, Wait]:
    """The wait of every rank that is in one. A rank whose peers have all arrived still waits, for nobody."""
    by_group = {table.group: table for table in tables}
    waits = {}
    for rank in evidence.ranks.values():
        wait = _wait_of(evidence, rank, by_group)
        if wait is not None:
            waits[rank.rank] = wait
    return waits


def _wait_of(evidence: Evidence, rank: RankEvidence, tables: Mapping[str, GroupTable]) -> Wait | None:
    crumb = rank.blocking
    if crumb is None:
        return _draining(rank, tables)
    table = tables.get(crumb.group)
    if crumb.phase == "p2p":
        return _p2p_wait(evidence, rank, crumb)
    if crumb.collective_seq > 0 and table is not None:
        missing = [r for r in table.missing(crumb.collective_seq) if r != rank.rank]
        return _wait(rank, "collective", missing, crumb, firm=True)
    if crumb.phase == "init" and rank.joined:
        return _wait(rank, "init", _behind(evidence, rank, crumb), crumb, firm=False)
    if crumb.phase == "init":
        absent = [
            r
            for r in evidence.all_ranks
            if r != rank.rank and not evidence.of(r).joined and not _in_init(evidence.of(r))
        ]
        return _wait(rank, "init", absent, crumb, firm=True)
    return None


def _behind(evidence: Evidence, rank: RankEvidence, crumb: Crumb) -> list[int]:
    """Who has not come to this group yet: of all ranks, or of its members where they make it alone."""
    others = [evidence.of(number) for number in evidence.all_ranks if number != rank.rank]
    if MEMBERS_ONLY in crumb.detail:
        members = {int(number) for number in re.findall(r"\d+", crumb.detail)}
        own = _times(rank, crumb.detail)
        return [other.rank for other in others if other.rank in members and _times(other, crumb.detail) < own]
    own = len(groups_made(rank.crumbs))
    return [other.rank for other in others if len(groups_made(other.crumbs)) < own]


def _times(rank: RankEvidence, detail: str) -> int:
    return sum(1 for c in rank.crumbs if c.phase == "init" and c.event == "begin" and c.detail == detail)


def groups_made(crumbs: Iterable[Crumb]) -> list[Crumb]:
    """Calls that all ranks make, members or not: init_process_group, and new_group but for what members make alone."""
    return [c for c in crumbs if c.phase == "init" and c.event == "begin" and MEMBERS_ONLY not in c.detail]


def _in_init(rank: RankEvidence) -> bool:
    return rank.innermost is not None and rank.innermost.phase == "init"


def _wait(
    rank: RankEvidence, kind: Literal["collective", "p2p", "init"], on: Iterable[int], crumb: Crumb, *, firm: bool
) -> Wait:
    return Wait(
        rank=rank.rank,
        kind=kind,
        on=tuple(sorted(on)),
        what=_what(crumb),
        frame=Frame(crumb.file, crumb.line, crumb.function) if crumb.file else None,
        since=crumb.time_ns / 1e9,
        firm=firm,
        group=crumb.group,
        seq=crumb.collective_seq,
    )


def _what(crumb: Crumb) -> str:
    if crumb.op in ("send", "recv") and crumb.peer >= 0:
        return f"send to rank {crumb.peer}" if crumb.op == "send" else f"recv from rank {crumb.peer}"
    if crumb.detail == "init_process_group":
        return crumb.detail
    if crumb.op not in ("none", "other"):
        return crumb.op
    return "init_process_group" if crumb.phase == "init" else crumb.phase


def _draining(rank: RankEvidence, tables: Mapping[str, GroupTable]) -> Wait | None:
    """A rank that started collectives asynchronously (DDP's reducer does) and whose peers have not started theirs."""
    phase = rank.innermost.phase if rank.innermost is not None else "step"
    if phase not in _MAY_DRAIN:
        return None
    for crumb in reversed(rank.crumbs[-256:]):
        if is_issue(crumb) and is_async(crumb) and (table := tables.get(crumb.group)) is not None:
            missing = [r for r in table.missing(crumb.collective_seq) if r != rank.rank]
            if missing:
                return _wait(rank, "collective", missing, crumb, firm=False)
    return None


def _p2p_wait(evidence: Evidence, rank: RankEvidence, crumb: Crumb) -> Wait | None:
    """A receive waits for the send of the same number: messages are counted per direction and peer."""
    if crumb.op not in ("send", "recv") or crumb.peer < 0:
        return _wait(rank, "p2p", (), crumb, firm=False)
    peer = evidence.of(crumb.peer)
    mirror = "send" if crumb.op == "recv" else "recv"
    # A receive from anybody may be the counterpart of any send, so it counts as one.
    theirs = max((peer.messages.get((mirror, other, crumb.group), 0) for other in (rank.rank, -1)), default=0)
    unknown = not peer.header or (theirs == 0 and not peer.complete)
    # gloo's send is a rendezvous; other backends may return from a send that nobody has received yet.
    blocks = crumb.op == "recv" or str(evidence.of(rank.rank).header.get("backend") or "gloo") == "gloo"
    if unknown or theirs >= crumb.collective_seq:
        return _wait(rank, "p2p", (), crumb, firm=False)
    # A peer that sends messages from helper threads may still send this one while its main thread waits.
    on_main = all(c.thread == peer.main_thread for c in peer.crumbs if c.phase == "p2p")
    return _wait(rank, "p2p", (crumb.peer,), crumb, firm=blocks and on_main)


def holders(waits: Mapping[int, Wait], evidence: Evidence) -> dict[int, list[int]]:
    """Ranks that are waited for and wait for nobody -> the ranks that wait for them, directly or through others."""
    found: dict[int, list[int]] = {}
    for rank in waits:
        for root in _roots(rank, waits, set()):
            if root != rank:
                found.setdefault(root, []).append(rank)
    return {root: sorted(set(found[root])) for root in sorted(found)}


def _roots(rank: int, waits: Mapping[int, Wait], seen: set[int]) -> set[int]:
    if rank in seen:
        return set()
    seen.add(rank)
    wait = waits.get(rank)
    if wait is None:
        return {rank}
    return set().union(*(_roots(peer, waits, seen) for peer in wait.on)) if wait.on else set()


def find_cycle(waits: Mapping[int, Wait]) -> list[int]:
    """Ranks that wait for each other in a circle, each firmly; empty where there is none.

    An edge to one of several missing members is enough: a collective needs them all.
    """
    for start in sorted(waits):
        path: list[int] = []
        cycle = _walk(start, waits, path, set())
        if cycle:
            return cycle
    return []


def _walk(rank: int, waits: Mapping[int, Wait], path: list[int], done: set[int]) -> list[int]:
    if rank in path:
        return path[path.index(rank) :]
    wait = waits.get(rank)
    if rank in done or wait is None or not wait.firm:
        return []
    path.append(rank)
    for peer in wait.on:
        cycle = _walk(peer, waits, path, done)
        if cycle:
            return cycle
    path.pop()
    done.add(rank)
    return []
