"""Rules on ranks that all wait: a circle, and who closed it (MC218); a call that all are in and none leaves (MC220).

A rank that stands in a circle got there by a call that it never made at that place before, or by none: what a rank
calls after what is known from its own history, over all groups and messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from model_check.diagnose.catalogue import CATALOGUE
from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence, RankEvidence, frame_of
from model_check.diagnose.findings import make_finding, waiting_text
from model_check.diagnose.waits import Wait, stuck_ranks
from model_check.record import Finding
from model_check.record.ring import Crumb
from model_check.record.stacks import Frame

_PHASES = frozenset({"collective", "barrier", "p2p"})
_NEWEST = 8  # calls in which the deviation is looked for
_LONGEST = 4  # the longest sequence of calls used to predict the next one
_ROUTINE = 3  # times that a call must have been seen before what follows it is called a habit
_BACK_IN_ORDER = "look at the named line: there the rank calls something else than in its earlier steps"


def cycle_finding(evidence: Evidence, cycle: list[int], waits: Mapping[int, Wait]) -> Finding:
    """Proven if every wait in the circle is proven; otherwise observed, since the stalled job may still go on."""
    lines = []
    for rank in cycle:
        wait = waits[rank]
        where = f" at {wait.frame.site}" if wait.frame is not None else ""
        group = f" in group {wait.group}" if wait.group else ""
        lines.append(f"observed: rank {rank} waits in {wait.what}{group}{where} for {ranks_text(wait.on)}")
    lines.append("inferred: every rank of the circle needs another one to move first; none can")
    proven = all(waits[rank].firm for rank in cycle)
    stuck = sorted(stuck_ranks(waits, firm=proven))
    left = departures(evidence, stuck)
    blame = _to_blame(cycle, {rank: waits[rank] for rank in stuck}) if not left else _Blame("left_its_order")
    guilty = [departure.rank for departure in left] or blame.ranks or cycle
    first = min(guilty)
    title = f"{ranks_text(cycle)} wait for each other in a circle"
    if left:
        title += f", since {ranks_text(guilty)} left {'its' if len(left) == 1 else 'their'} usual order"
        lines += [f"inferred: rank {d.rank} left the order of its own earlier calls: {d.text}" for d in left]
    else:
        lines.append(f"inferred: {blame.why}")
    return make_finding(
        "MC218",
        title,
        ranks=guilty,
        victims=[rank for rank in waits if rank not in guilty],
        frame=left[0].frame if left else waits[first].frame,
        evidence=lines,
        certainty="proven" if proven else "observed",
        severity="error" if proven or evidence.killed_as_hung else "warning",
        step=evidence.of(first).step,
        phase=waits[first].kind,
        fix=(_BACK_IN_ORDER, *CATALOGUE["MC218"].fix) if left else (),
        began=max(waits[rank].since for rank in cycle),
        now=evidence.now,
        cause=blame.cause,
        facts={"waits_in": {str(rank): waits[rank].what for rank in stuck}},
    )


class _Blame(NamedTuple):
    cause: str  # of the finding
    ranks: Sequence[int] = ()
    why: str = ""


def _to_blame(cycle: list[int], stuck: Mapping[int, Wait]) -> _Blame:
    """If no history decides: the rank that names the wrong peer in a message, or the ranks apart from the majority."""
    if (wrong := _wrong_peer(stuck)) is not None:
        return wrong
    places = {rank: (wait.what, wait.group, wait.seq) for rank, wait in stuck.items() if wait.kind == "collective"}
    common, most = Counter(places.values()).most_common(1)[0] if places else (None, 0)
    apart = [rank for rank in cycle if places.get(rank) != common]
    if 2 * most <= len(stuck) or len(stuck) < 3 or not apart:
        return _Blame("undecided", why="nothing says which of them is wrong, so all of them are named")
    together = [rank for rank, place in places.items() if place == common]
    why = (
        f"{ranks_text(together)} are in one {stuck[together[0]].what}, "
        f"{ranks_text(apart)} {'is' if len(apart) == 1 else 'are'} not; whoever it waits for may be wrong as well"
    )
    return _Blame("apart", apart, why)


def _wrong_peer(waits: Mapping[int, Wait]) -> _Blame | None:
    """The rank that exchanges a message with a rank that does not expect it, while another rank waits for it.

    Example: rank 1 sends to rank 2, rank 2 receives from rank 3, and rank 3 sends it nothing. Rank 2 is wrong.
    """
    messages = {rank: wait for rank, wait in waits.items() if wait.kind == "p2p" and wait.peer >= 0}
    found = {
        rank: f"rank {other} waits in {theirs.what}, rank {rank} in {wait.what}, which has no message for it"
        for rank, wait in messages.items()
        if wait.peer in waits and (wait.peer not in messages or messages[wait.peer].peer != rank)
        for other, theirs in messages.items()
        if theirs.peer == rank and other != wait.peer and theirs.op != wait.op
    }
    if len(found) > 1:  # keep a rank only if most messages from its line name another peer
        found = {rank: why for rank, why in found.items() if _usual_peer(messages, rank) != messages[rank].peer}
    return _Blame("wrong_peer", list(found), next(iter(found.values()))) if len(found) == 1 else None


def _usual_peer(messages: Mapping[int, Wait], rank: int) -> int:
    same = [
        wait.peer for wait in messages.values() if (wait.op, wait.frame) == (messages[rank].op, messages[rank].frame)
    ]
    return Counter(same).most_common(1)[0][0]


def all_wait_finding(evidence: Evidence, waits: Mapping[int, Wait]) -> Finding:
    """Everybody waits, and nobody is known to hold the others up: all have arrived, or the records do not say who."""
    first = min(waits)
    cause = "one_call"
    if len({(wait.what, wait.group, wait.seq) for wait in waits.values()}) == 1:
        title = f"every rank is inside {waits[first].what}, and the transfer does not end"
        reasons = ["inferred: the network or a device between the ranks is slow or stuck, not the script"]
        if waits[first].seq:
            reasons.insert(0, "observed: all members of the group have called it with the same signature")
    else:
        cause = "different_calls"
        title = "the ranks wait in different calls, and none of them goes on"
        reasons = ["inferred: one of these calls waits for a rank that is in another; the records do not say which"]
    return make_finding(
        "MC220",
        title,
        ranks=[],
        victims=sorted(waits),
        frame=waits[first].frame,
        evidence=[*waiting_text(waits, sorted(waits)), *reasons],
        severity="error" if evidence.killed_as_hung else "warning",
        step=evidence.of(first).step,
        phase="collective",
        began=max(wait.since for wait in waits.values()),
        now=evidence.now,
        cause=cause,
    )


@dataclass(frozen=True)
class Departure:
    """The first call with which a rank left its routine."""

    rank: int
    frame: Frame
    text: str


def departures(evidence: Evidence, ranks: Iterable[int]) -> list[Departure]:
    """The ranks that just left their own routine; empty if all of them did, or none.

    First looks at what usually follows one call; if a call has several successors, at what follows a sequence of calls.
    """
    asked = list(ranks)
    calls = {rank: _calls(evidence.of(rank)) for rank in asked}
    for length in range(1, _LONGEST + 1):
        found = [d for rank in asked if (d := _departure(evidence.of(rank), calls[rank], length)) is not None]
        if found:
            return found if len(found) < len(asked) else []
    return []


def _calls(rank: RankEvidence) -> list[Crumb]:
    return [c for c in rank.crumbs if c.phase in _PHASES and c.event == "begin" and not c.is_wait and c.file]


def _departure(rank: RankEvidence, calls: list[Crumb], length: int) -> Departure | None:
    keys = [_key(call) for call in calls]
    for at in range(max(length, len(calls) - _NEWEST), len(calls)):
        run = keys[at - length : at]
        after = [calls[i + length] for i in range(at - length) if keys[i : i + length] == run]
        if len(after) >= _ROUTINE and all(_key(call) != keys[at] for call in after):
            habit = _most_common(after)
            text = (
                f"after {_describe(calls[at - 1])} it used to call {_describe(habit)}, this time {_describe(calls[at])}"
            )
            return Departure(rank.rank, frame_of(calls[at], rank.cwd), text)
    return None


def _key(call: Crumb) -> tuple[str, str, str, int]:
    return (call.op, call.group, call.site, call.peer)


def _most_common(calls: list[Crumb]) -> Crumb:
    key, _ = Counter(map(_key, calls)).most_common(1)[0]
    return next(call for call in calls if _key(call) == key)


def _describe(call: Crumb) -> str:
    """all_reduce in group ranks 0,1 at train.py:40; recv from rank 2 at train.py:19"""
    if call.op in ("send", "recv") and call.peer >= 0:
        return f"{call.op} {'to' if call.op == 'send' else 'from'} rank {call.peer} at {call.site}"
    return f"{call.op} in group {call.group} at {call.site}" if call.group else f"{call.op} at {call.site}"
