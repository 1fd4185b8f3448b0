"""Rules on ranks that join or make process groups on different terms: MC106 (sizes of the world), MC201 (order).

init_process_group and new_group are met by number, like collectives: what the ranks ask for there must be the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile

from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence, RankEvidence, frame_of
from model_check.diagnose.findings import make_finding, waiting_text
from model_check.diagnose.issues import is_issue
from model_check.diagnose.waits import Wait, groups_made
from model_check.record import Finding
from model_check.record.events.process import Joining
from model_check.record.ring import Crumb


def joining_findings(evidence: Evidence, waits: Mapping[int, Wait]) -> list[Finding]:
    """What keeps ranks from meeting, while they wait to meet."""
    found = _world_sizes_differ(evidence, waits) or _groups_in_another_order(evidence, waits)
    return [found] if found is not None else []


def met_the_wrong_members(evidence: Evidence, bereft: Sequence[int], facts: Sequence[str]) -> Finding | None:
    """A rank that is gone had no need of those it left behind: it met others under the number of their group.

    Two ranks that are both the second of a group with one number race for its place there. The loser waits in
    new_group for a peer that has long met the winner, does all its work with it and leaves.
    """
    found = _groups_in_another_order(evidence, {}, bereft=bereft, facts=facts)
    return found if found is not None and found.severity == "error" else None


def _world_sizes_differ(evidence: Evidence, waits: Mapping[int, Wait]) -> Finding | None:
    """Each rank waits for as many others as it was told there are."""
    joins = {rank.rank: rank.happened(Joining) for rank in evidence.ranks.values() if rank.alive}
    latest = max(map(len, joins.values()), default=0)
    # A rank that has joined less often takes no part, or comes later: it joins another world.
    newest = {rank: asked[-1].world_size for rank, asked in joins.items() if asked and len(asked) == latest}
    sizes = {rank: size for rank, size in newest.items() if size}
    if len(set(sizes.values())) < 2 or not any(wait.kind == "init" for wait in waits.values()):
        return None
    odd = _odd_ones(sizes)
    first = min(odd or sizes)
    said = "; ".join(
        f"{ranks_text(r for r, other in sizes.items() if other == size)}: {size}"
        for size in sorted(set(sizes.values()))
    )
    return make_finding(
        "MC106",
        "the ranks join process groups of different sizes",
        ranks=odd or sizes,
        victims=[rank for rank in waits if rank not in odd] if odd else [],
        frame=waits[first].frame if first in waits else None,
        evidence=[
            f"observed: world_size at init_process_group differs: {said}",
            *waiting_text(waits, sorted(waits)),
            "inferred: a rank that was told of more ranks than there are waits for one that never comes",
        ],
        certainty="proven",
        phase="init",
        fix=("pass one world_size on all ranks, or none: init_process_group reads WORLD_SIZE by itself",),
        began=max(wait.since for wait in waits.values()),
        now=evidence.now,
    )


def _groups_in_another_order(
    evidence: Evidence, waits: Mapping[int, Wait], *, bereft: Sequence[int] = (), facts: Sequence[str] = ()
) -> Finding | None:
    """new_group is a call of all ranks, members or not: the n-th one makes the same group on each of them."""
    made = {rank.rank: _made_by_all(rank) for rank in evidence.ranks.values() if rank.complete}
    for number in range(max(map(len, made.values()), default=0)):
        calls = {rank: groups[number] for rank, groups in made.items() if len(groups) > number}
        members = {rank: crumb.detail for rank, crumb in calls.items()}
        if len(set(members.values())) > 1:
            stuck = [rank for rank in waits if rank in calls and waits[rank].kind == "init"]
            stuck += [rank for rank in bereft if rank in calls and _stuck_apart(evidence.of(rank), made)]
            known = [*waiting_text(waits, sorted(waits)), *facts]
            return _another_order(evidence, number, calls, members, known, is_proven=bool(stuck))
    return None


def _stuck_apart(rank: RankEvidence, made: Mapping[int, list[Crumb]]) -> bool:
    """Whether the rank never got past its last group, and others made a different one under that number."""
    number = len(made[rank.rank]) - 1
    last = made[rank.rank][number]
    if any(crumb.seq > last.seq and is_issue(crumb) for crumb in rank.crumbs):
        return False
    return any(groups[number].detail != last.detail for groups in made.values() if len(groups) > number)


def _made_by_all(rank: RankEvidence) -> list[Crumb]:
    """Those that can be numbered: of a long history the middle is left out, and what follows it has lost its number."""
    whole = list(takewhile(lambda pair: pair[1].seq - pair[0].seq <= 1, pairwise(rank.crumbs)))
    unbroken = [*rank.crumbs[:1], *(crumb for _, crumb in whole)]
    return [crumb for crumb in groups_made(unbroken) if crumb.detail != "init_process_group"]


def _another_order(
    evidence: Evidence,
    number: int,
    calls: dict[int, Crumb],
    members: dict[int, str],
    facts: Sequence[str],
    *,
    is_proven: bool,
) -> Finding:
    odd = _odd_ones(members)
    first = min(odd or calls)
    root = evidence.of(first).cwd
    blamed = [] if odd else ["inferred: nothing says which of these ranks is the wrong one, so none is blamed"]
    return make_finding(
        "MC201",
        f"{ranks_text(odd)} made process groups in another order than the other ranks"
        if odd
        else f"{ranks_text(calls)} make their process groups in different orders",
        ranks=odd or calls,
        victims=[rank for rank in evidence.all_ranks if rank not in odd] if odd else [],
        frame=frame_of(calls[first], root),
        evidence=[
            *_who_made_what(number, calls, members),
            *facts,
            *blamed,
            "inferred: ranks find each other by the number of the group, so some wait for members that are in another",
        ],
        certainty="proven" if is_proven else "observed",
        severity="error" if is_proven else "warning",
        phase="init",
        fix=(
            "call new_group for all groups on all ranks, members or not, in one order; then pick the own one",
            "new_group(…, use_local_synchronization=True) is called by the members alone",
        ),
        began=max(crumb.time_ns / 1e9 for crumb in calls.values()),
        now=evidence.now,
        cause="groups",
        facts={"groups": {str(rank): members[rank] for rank in sorted(members)}},
    )


def _who_made_what(number: int, calls: Mapping[int, Crumb], members: Mapping[int, str]) -> list[str]:
    lines = []
    for group in dict.fromkeys(members[rank] for rank in sorted(calls)):
        makers = [rank for rank in sorted(calls) if members[rank] == group]
        site = calls[makers[0]].site
        lines.append(f"observed: new_group number {number + 1} of {ranks_text(makers)} is of {group}, at {site}")
    return lines


def _odd_ones(said: Mapping[int, object]) -> list[int]:
    """The ranks that differ from most; none where there is no majority."""
    value, most = Counter(said.values()).most_common(1)[0]
    return sorted(rank for rank in said if said[rank] != value) if most > len(said) / 2 else []
