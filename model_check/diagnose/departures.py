"""Rules on ranks that left with exit code 0 while others still needed them: MC308, MC309, MC217, and why they left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence, RankEvidence, frame_of
from model_check.diagnose.findings import make_finding
from model_check.diagnose.issues import GroupTable, Issue, is_issue
from model_check.diagnose.joining import met_the_wrong_members
from model_check.diagnose.raised import last_swallowed, swallowed_finding, unseen_swallow_finding
from model_check.diagnose.uneven import short_of_data, uneven_finding
from model_check.record import Finding
from model_check.record.error_texts import is_store_loss
from model_check.record.stacks import Frame


def departed_finding(
    evidence: Evidence, tables: Sequence[GroupTable], gone: Sequence[int], victims: Sequence[int], known: list[str]
) -> Finding:
    """Why ranks that ended without an error are missed by the others."""
    apart = met_the_wrong_members(evidence, victims, [*_exit_facts(evidence, gone), *known])
    if apart is not None:
        return apart
    first = min((evidence.of(rank) for rank in gone), key=lambda r: r.exit.t if r.exit is not None else 0.0)
    swallowed = last_swallowed(evidence, first.rank)
    if swallowed is not None:
        return swallowed_finding(evidence, first.rank, swallowed, victims, known, shown_at=_left_at(first))
    out = short_of_data(evidence, gone, [*gone, *victims])
    if out:
        return uneven_finding(evidence, out, victims, [*_exit_facts(evidence, gone), *known])
    if any(_lost_the_store(evidence.of(rank)) for rank in victims) and first.rank == 0:
        return _left(evidence, "MC309", "rank 0, which hosts the store, is gone", first, victims, known)
    if first.announced_exit.via in ("sys.exit", "os._exit"):
        title = f"rank {first.rank} left early with exit code 0"
        return _left(evidence, "MC308", title, first, victims, known)
    lonely = _lonely_call(tables, gone, victims)
    if lonely is not None:
        return _lonely(evidence, lonely, gone, known)
    if first.exit is not None and first.exit.code is None:
        return _left(
            evidence, "MC217", f"rank {first.rank} is gone while other ranks wait for it", first, victims, known
        )
    return _fewer_collectives(evidence, first, victims, known)


def _fewer_collectives(evidence: Evidence, rank: RankEvidence, victims: Sequence[int], known: list[str]) -> Finding:
    """It returned as if it had done everything, and is short of a call that the others make."""
    last = _last_collective(rank)
    told = [*_exit_facts(evidence, [rank.rank]), *known]
    unseen = unseen_swallow_finding(evidence, rank.rank, last, victims, told, _left_at(rank)) if last else None
    if unseen is not None:
        return unseen
    title = f"rank {rank.rank} finished with fewer collectives than its peers: it skipped one"
    return _left(evidence, "MC206", title, rank, victims, known, cause="fewer_calls")


def _left_at(rank: RankEvidence) -> float | None:
    return rank.exit.t if rank.exit is not None else rank.last_progress_t


def _left(
    evidence: Evidence,
    code: str,
    title: str,
    rank: RankEvidence,
    victims: Iterable[int],
    known: list[str],
    cause: str | None = None,
) -> Finding:
    via = rank.announced_exit.via
    return make_finding(
        code,
        title,
        ranks=[rank.rank],
        victims=victims,
        frame=rank.announced_exit.user_frame or _last_collective(rank) or rank.last_site(),
        evidence=[*_exit_facts(evidence, [rank.rank]), *known],
        certainty="proven",
        step=rank.step,
        phase="exit",
        began=_left_at(rank),
        now=evidence.now,
        cause=cause,
        facts={"via": via} if via else None,
    )


def _last_collective(rank: RankEvidence) -> Frame | None:
    """Where it last met its peers: what it did at its very end has nothing to do with them."""
    crumb = next((c for c in reversed(rank.crumbs) if is_issue(c) and c.file), None)
    return frame_of(crumb, rank.cwd) if crumb is not None else None


def _exit_facts(evidence: Evidence, ranks: Iterable[int]) -> list[str]:
    facts = []
    for number in ranks:
        rank = evidence.of(number)
        way = rank.announced_exit.via
        code = rank.exit.code if rank.exit is not None else None
        last = rank.last_site()
        place = f"; its last recorded call was at {last.site}" if last is not None else ""
        ended = f"exited with code {code}" if code is not None else "is gone"
        facts.append(f"observed: rank {number} {ended}" + (f" through {way}" if way else "") + place)
    return facts


def _lost_the_store(rank: RankEvidence) -> bool:
    if rank.innermost is not None and rank.innermost.phase == "store":
        return True
    return any(is_store_loss(f"{error.type}: {error.message}") for error in rank.exceptions)


def _lonely_call(tables: Sequence[GroupTable], gone: Sequence[int], victims: Sequence[int]) -> Issue | None:
    """A call that only the waiting ranks make, at a place where they never called before."""
    for table in tables:
        for rank in victims:
            seq = table.highest(rank)
            issue = table.issues.get(rank, {}).get(seq)
            if issue is None or any(table.highest(other) >= seq for other in gone):
                continue
            history = table.history(rank, seq)
            if history and all(past.key != issue.key for past in history) and len(victims) == 1:
                return issue
    return None


def _lonely(evidence: Evidence, issue: Issue, gone: Sequence[int], known: list[str]) -> Finding:
    is_barrier = issue.op in ("barrier", "monitored_barrier")
    return make_finding(
        "MC206" if is_barrier else "MC207",
        f"{issue.op} on rank {issue.rank} has no counterpart on {ranks_text(gone)}",
        ranks=[issue.rank],
        victims=[],
        frame=issue.frame,
        evidence=[
            f"observed: rank {issue.rank} called {issue.describe()}, which it had never called before",
            *_exit_facts(evidence, gone),
            *known,
            "inferred: the call stands in a branch that only this rank takes, such as `if rank == 0`",
        ],
        certainty="proven",
        step=issue.step,
        phase="collective",
        began=issue.t,
        now=evidence.now,
        cause="lonely_call",
        facts={"op": issue.op},
    )
