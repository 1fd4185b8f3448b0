"""Who waits for whom.

A rank in an open collective waits for the members that have not issued it; in a receive, for the matching send; in
init_process_group, for the ranks that have not come. Whoever is waited for and waits for nobody holds the job up.
A circle of firm waits cannot resolve itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Literal

from model_check.diagnose.evidence import Evidence, RankEvidence
from model_check.diagnose.issues import GroupTable, is_issue
from model_check.record.ring import TAG, Crumb
from model_check.record.stacks import Frame

# Phases of the main thread in which an asynchronous collective that was started earlier may be what it waits for.
_MAY_DRAIN = frozenset({"backward", "forward", "optimizer", "step", "eval", "exit"})


@dataclass(frozen=True)
class Wait:
    """One rank's wait. `firm`: the records prove that the main thread can do nothing else until the wait ends."""

    rank: int
    kind: Literal["collective", "p2p", "init"]
    on: tuple[int, ...]
    what: str
    frame: Frame | None
    since: float
    firm: bool
    group: str = ""
    seq: int = 0
    op: str = ""
    peer: int = -1  # of a message
    any_of: bool = False  # one of `on` is enough: a receive that names no sender


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
    if crumb.by_members_only:
        own = _times(rank, crumb.detail)
        return [other.rank for other in others if other.rank in crumb.members and _times(other, crumb.detail) < own]
    own = len(groups_made(rank.crumbs))
    return [other.rank for other in others if len(groups_made(other.crumbs)) < own]


def _times(rank: RankEvidence, detail: str) -> int:
    return sum(1 for c in rank.crumbs if c.phase == "init" and c.event == "begin" and c.detail == detail)


def groups_made(crumbs: Iterable[Crumb]) -> list[Crumb]:
    """Calls that all ranks make, members or not: init_process_group, and new_group but for what members make alone."""
    return [c for c in crumbs if c.phase == "init" and c.event == "begin" and not c.by_members_only]


def _in_init(rank: RankEvidence) -> bool:
    return rank.innermost is not None and rank.innermost.phase == "init"


def _wait(
    rank: RankEvidence,
    kind: Literal["collective", "p2p", "init"],
    on: Iterable[int],
    crumb: Crumb,
    *,
    firm: bool,
    any_of: bool = False,
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
        op=crumb.op,
        peer=crumb.peer if kind == "p2p" else -1,
        any_of=any_of,
    )


def _what(crumb: Crumb) -> str:
    if crumb.op in ("send", "recv") and crumb.peer >= 0:
        tag = f" with {crumb.detail}" if crumb.detail.startswith(TAG) else ""
        return f"{crumb.op} {'to' if crumb.op == 'send' else 'from'} rank {crumb.peer}{tag}"
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
        if is_issue(crumb) and crumb.is_async and (table := tables.get(crumb.group)) is not None:
            missing = [r for r in table.missing(crumb.collective_seq) if r != rank.rank]
            if missing:
                return _wait(rank, "collective", missing, crumb, firm=False)
    return None


def _p2p_wait(evidence: Evidence, rank: RankEvidence, crumb: Crumb) -> Wait | None:
    """A receive waits for the send of the same number: messages are counted per direction and peer."""
    if crumb.op == "recv" and crumb.peer < 0:
        return _wait_for_anybody(evidence, rank, crumb)
    if crumb.op not in ("send", "recv") or crumb.peer < 0:
        return _wait(rank, "p2p", (), crumb, firm=False)
    peer = evidence.of(crumb.peer)
    mirror = "send" if crumb.op == "recv" else "recv"
    # A receive from anybody may be the counterpart of any send, so it counts as one.
    theirs = max((peer.messages.get((mirror, other, crumb.group), 0) for other in (rank.rank, -1)), default=0)
    if not peer.header or (theirs >= crumb.collective_seq and not _other_tag(crumb, peer.blocking, rank.rank)):
        return _wait(rank, "p2p", (), crumb, firm=False)
    # gloo's send is a rendezvous; other backends may return from a send that nobody has received yet.
    blocks = crumb.op == "recv" or evidence.of(rank.rank).header.backend in (None, "gloo")
    known = theirs > 0 or peer.complete
    return _wait(rank, "p2p", (crumb.peer,), crumb, firm=blocks and known and _messages_on_main(peer))


def _other_tag(ours: Crumb, theirs: Crumb | None, rank: int) -> bool:
    """Whether the two ranks are at both ends of one message, but with different tags."""
    return (
        theirs is not None
        and {ours.op, theirs.op} == {"send", "recv"}
        and (theirs.peer, theirs.group) == (rank, ours.group)
        and not (ours.is_wait or theirs.is_wait)
        and ours.detail != theirs.detail
    )


def _wait_for_anybody(evidence: Evidence, rank: RankEvidence, crumb: Crumb) -> Wait:
    """A receive that names no sender ends with the next message from any member that can still send one."""
    peers = [evidence.of(number) for number in evidence.group_members(crumb.group) if number != rank.rank]
    sent = [peer.messages.get(("send", rank.rank, crumb.group), 0) for peer in peers]
    received = sum(n for (op, _, group), n in rank.messages.items() if (op, group) == ("recv", crumb.group))
    if sum(sent) >= received:
        return _wait(rank, "p2p", (), crumb, firm=False)  # a message is on its way
    standing = [peer for peer in peers if evidence.stands(peer.rank)] or peers
    known = all(peer.header and (n > 0 or peer.complete) for peer, n in zip(peers, sent, strict=True))
    firm = known and all(map(_messages_on_main, peers))
    return _wait(rank, "p2p", [peer.rank for peer in standing], crumb, firm=firm, any_of=True)


def _messages_on_main(peer: RankEvidence) -> bool:
    """A peer that sends messages from helper threads may still send one while its main thread waits."""
    return all(c.thread == peer.main_thread for c in peer.crumbs if c.phase == "p2p")


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


def find_cycle(waits: Mapping[int, Wait], *, firm: bool = True) -> list[int]:
    """Ranks that wait for each other in a circle; empty if there is none. `firm`: only proven waits.

    An edge to one of several missing members is enough, since a collective needs them all.
    """
    stuck = stuck_ranks(waits, firm=firm)
    path: list[int] = []
    rank = min(stuck, default=-1)
    while stuck and rank not in path:
        path.append(rank)
        rank = next(peer for peer in waits[rank].on if peer in stuck)
    return path[path.index(rank) :] if path else []


def stuck_ranks(waits: Mapping[int, Wait], *, firm: bool = True) -> set[int]:
    """All ranks in circles, and all ranks that wait for one of them."""
    stuck = {rank for rank, wait in waits.items() if wait.on and (wait.firm or not firm)}
    while free := {rank for rank in stuck if not _is_held(waits[rank], stuck)}:
        stuck -= free
    return stuck


def _is_held(wait: Wait, stuck: Set[int]) -> bool:
    held = [peer in stuck for peer in wait.on]
    return all(held) if wait.any_of else any(held)
