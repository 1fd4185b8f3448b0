"""What a rank calls after what, by its own history: over all groups and messages, unlike the order within one group.

A rank that stands in a circle of waits got there by a call that it never made at that place before, or by none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from model_check.diagnose.evidence import Evidence, RankEvidence, frame_of
from model_check.record.ring import Crumb
from model_check.record.stacks import Frame

_PHASES = frozenset({"collective", "barrier", "p2p"})
_NEWEST = 8  # calls in which the deviation is looked for
_LONGEST = 4  # the longest sequence of calls used to predict the next one
_ROUTINE = 3  # times that a call must have been seen before what follows it is called a habit


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
    return [c for c in rank.crumbs if c.phase in _PHASES and c.event == "begin" and c.detail != "wait" and c.file]


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
