"""Rules on collectives that do not match: MC201-MC203, MC206-MC208, MC221; what is behind them is asked elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from model_check.diagnose.branches import rank_branch
from model_check.diagnose.collectives import Divergence, Matcher, find_divergence, ranks_text
from model_check.diagnose.evidence import Evidence
from model_check.diagnose.findings import make_finding
from model_check.diagnose.issues import GroupTable, Issue, flight_tables
from model_check.diagnose.raised import last_swallowed, swallowed_finding, unseen_swallow_finding
from model_check.diagnose.uneven import left_their_loop, short_of_data, uneven_finding, uneven_steps_finding
from model_check.record import Finding
from model_check.record.events.crashes import CaughtException
from model_check.record.verdict import Certainty, Severity

_OWN_GROUPS = "give each thread a process group of its own: dist.new_group(), made on the main thread of all ranks"
_SAME_MODULES = "run the same modules, forward and backward, on all ranks: DDP or FSDP starts a collective for each"
_UNUSED = "where a parameter may get no gradient on a rank: DistributedDataParallel(…, find_unused_parameters=True)"
_IN_STEP = frozenset({"forward", "backward", "data", "collective"})  # phases of the call that an exception interrupted
_DIFFERS = {"shape": "shape", "dtype": "dtype", "root": "root", "reduction": "reduction", "crossed": "unit"}
_SHORT = {
    "op": "MC201",
    "root": "MC221",
    "shape": "MC202",
    "dtype": "MC203",
    "reduction": "MC223",
    "crossed": "MC208",
    "shifted": "MC206",
}


def mismatch_findings(evidence: Evidence, tables: Iterable[GroupTable], matcher: Matcher) -> list[Finding]:
    """One finding per group whose ranks parted; the flight recorder is asked where the rings saw nothing."""
    parted = [d for d in map(matcher.find, tables) if d is not None]
    if not parted:
        parted = [d for d in map(find_divergence, flight_tables(evidence)) if d is not None and d.kind != "shifted"]
    parted.sort(key=lambda d: min(issue.t for issue in d.calls.values()))
    return [_finding(evidence, divergence) for divergence in parted]


def _finding(evidence: Evidence, divergence: Divergence) -> Finding:
    swallowed = _swallowed_before(evidence, divergence)
    if swallowed is not None:
        rank, record = swallowed
        return swallowed_finding(
            evidence,
            rank,
            record,
            victims=set(divergence.calls) - {rank},
            known=_calls(divergence),
            shown_at=max(issue.t for issue in divergence.calls.values()),
        )
    short = short_of_data(evidence, divergence.calls, divergence.calls) if _calls_differ(divergence) else []
    if short:
        found = uneven_finding(evidence, short, set(divergence.calls) - set(short), _calls(divergence))
        return replace(found, facts={**found.facts, **_operations(divergence, short)})
    frames = {rank: issue.frame for rank, issue in divergence.calls.items() if issue.frame is not None}
    early = left_their_loop(evidence, frames) if _calls_differ(divergence) else []
    if (unseen := _skipped_by_a_handler(evidence, divergence, early or divergence.guilty)) is not None:
        return unseen
    if early:
        found = uneven_steps_finding(evidence, early, set(divergence.calls) - set(early), _calls(divergence))
        return replace(found, facts={**found.facts, **_operations(divergence, early)})
    return _plain(evidence, divergence)


def _skipped_by_a_handler(evidence: Evidence, divergence: Divergence, suspects: Sequence[int]) -> Finding | None:
    """One rank is past a call that the others make in a `try` whose handler goes on without it."""
    if divergence.manner == "order" or divergence.kind != "op" or len(suspects) != 1:
        return None
    (rank,) = suspects
    lost = next((i for r, i in divergence.calls.items() if r != rank and i.frame is not None), None)
    if lost is None or lost.frame is None:
        return None
    facts = _calls(divergence)
    began = max(issue.t for issue in divergence.calls.values())
    return unseen_swallow_finding(evidence, rank, lost.frame, set(divergence.calls) - {rank}, facts, began)


def _calls_differ(divergence: Divergence) -> bool:
    """The ranks stand at different places of the script, not at one with different tensors."""
    sites = {issue.site for issue in divergence.calls.values()}
    return divergence.kind == "op" or (divergence.kind == "shape" and len(sites) > 1)


def _plain(evidence: Evidence, divergence: Divergence) -> Finding:
    calls, guilty = divergence.calls, divergence.guilty
    threads = _threads(evidence, calls)
    # Of two threads neither has left a call out: only their order is another one.
    code = "MC201" if threads and divergence.kind == "op" else _code(divergence)
    first = divergence.first_call()
    everybody = sorted(set(divergence.table.members) | set(calls))
    facts = [*_calls(divergence), *threads]
    facts += [f"inferred: {divergence.blame.why}"] if divergence.blame.why else []
    if not guilty:
        facts.append("inferred: nothing in the history says which of these ranks is the wrong one, so none is blamed")
    facts.append(_consequence(divergence))
    return make_finding(
        code,
        _title(divergence, code),
        ranks=guilty or calls,
        victims=[r for r in everybody if r not in guilty] if guilty else [],
        frame=first.frame,
        evidence=facts,
        certainty=_certainty(divergence),
        severity=_severity(divergence),
        step=first.step,
        phase="collective",
        tensor=_tensor(first),
        fix=(_OWN_GROUPS,) if threads else _fix(divergence, code),
        began=max(issue.t for issue in calls.values()) or None,
        now=evidence.now,
        cause="threads" if threads else divergence.blame.by or "undecided",
        facts=_call_facts(divergence),
    )


def _operations(divergence: Divergence, ranks: Sequence[int]) -> dict[str, Any]:
    """What the first of these ranks called, and the first of the others."""
    others = [rank for rank in sorted(divergence.calls) if rank not in ranks]
    return {"op": divergence.calls[min(ranks)].op, "peers_op": divergence.calls[others[0] if others else min(ranks)].op}


def _call_facts(divergence: Divergence) -> dict[str, Any]:
    """What the named ranks called and what their peers called, with what the two differ in."""
    own, peers = divergence.first_call(), divergence.peers_call()
    facts = _operations(divergence, divergence.guilty or (own.rank,))
    if (name := _DIFFERS.get(divergence.kind)) is not None:
        for key, call in ((name, own), (f"peers_{name}", peers)):
            value = getattr(call, name)
            facts[key] = list(value) if isinstance(value, tuple) else value
    return facts | ({"condition": divergence.blame.condition} if divergence.blame.condition else {})


def _fix(divergence: Divergence, code: str) -> tuple[str, ...]:
    """Empty: what the catalogue says. A call that DDP or FSDP makes is not in the user's hands, but its modules are."""
    skipped = [issue for rank, issue in divergence.calls.items() if rank not in divergence.guilty]
    first = divergence.first_call()
    came_early = any(past.key == first.key for past in divergence.table.history(first.rank, first.seq))
    by_modules = code == "MC206" and came_early and skipped and all(issue.native for issue in skipped)
    return (_SAME_MODULES, _UNUSED) if by_modules else ()


def _code(divergence: Divergence) -> str:
    if divergence.kind in ("op", "shifted") and divergence.manner == "missing":
        return "MC206"
    if divergence.kind in ("op", "shifted") and divergence.manner == "extra":
        return "MC207"
    return _SHORT[divergence.kind]


def _certainty(divergence: Divergence) -> Certainty:
    if divergence.kind == "shifted":
        return "suspected"
    if divergence.kind == "crossed":
        return "observed"
    return "proven"


def _severity(divergence: Divergence) -> Severity:
    return "warning" if divergence.kind == "shifted" else "error"


def _title(divergence: Divergence, code: str) -> str:
    first = divergence.first_call()
    who = ranks_text(divergence.guilty or divergence.calls)
    one = len(divergence.guilty or divergence.calls) == 1
    others = divergence.peers_call()
    if divergence.kind == "root":
        return f"{_roots_used(divergence)} in one {first.op}"
    if not divergence.guilty:
        kinds = {"shape": "sizes", "dtype": "dtypes", "reduction": "reductions", "crossed": "crossed order"}
        return f"{who} called different {kinds.get(divergence.kind, 'collectives')} at the same place in their order"
    if code == "MC206":
        if divergence.kind == "op" and others.op != first.op and _is_a_lone_barrier(divergence):
            return f"{first.op} on {who} has no counterpart on the other ranks"
        return f"{who} skipped a collective that the other ranks called"
    if code == "MC207":
        return f"{who} called {'an' if first.op[0] in 'aeiou' else 'a'} {first.op} that no other rank calls"
    if code == "MC202":
        what = "number of objects" if first.op == "broadcast_object" else "size"
        return f"{who} called {first.op} with another {what} than its peers"
    if code == "MC203":
        return f"{who} called {first.op} with {first.dtype}, its peers with {others.dtype}"
    if code == "MC223":
        return f"{who} called {first.op} by {first.reduction}, its peers by {others.reduction}"
    if code == "MC208":
        return f"{who} call{'s' if one else ''} two collectives of the same size in swapped order"
    if first.op == others.op:
        return f"{who} called {first.describe()} where the other ranks called {others.describe()}"
    return f"{who} called {first.op} where the other ranks called {others.op}"


def _is_a_lone_barrier(divergence: Divergence) -> bool:
    """A barrier that the guilty ranks never called before, where no condition kept them from the others' call."""
    first = divergence.first_call()
    others = [i for rank, i in divergence.calls.items() if rank not in divergence.guilty and i.frame is not None]
    kept_out = any(issue.frame is not None and rank_branch(issue.frame) for issue in others)
    called = any(past.key == first.key for past in divergence.table.history(first.rank, first.seq))
    return first.op in ("barrier", "monitored_barrier") and not called and not kept_out


def _roots_used(divergence: Divergence) -> str:
    """rank 2 used root 1, ranks 0, 1 and 3 used root 0; the guilty first"""
    used: dict[int, list[int]] = {}
    for rank, issue in sorted(divergence.calls.items(), key=lambda call: (call[0] not in divergence.guilty, call[0])):
        used.setdefault(issue.root, []).append(rank)
    return ", ".join(f"{ranks_text(ranks)} used root {root}" for root, ranks in used.items() if root >= 0)


def _calls(divergence: Divergence) -> list[str]:
    """What every rank called at the place where they part."""
    where = f"collective {divergence.seq} of group {divergence.table.group or 'default'}"
    return [
        f"observed: {where}: {ranks_text(ranks)} called {text}"
        for text, ranks in _grouped(divergence.calls.items()).items()
    ]


def _threads(evidence: Evidence, calls: Mapping[int, Issue]) -> list[str]:
    """Where some of the calls come from helper threads: no order holds between two threads of a rank."""
    helpers = [
        rank
        for rank, issue in calls.items()
        if issue.thread and not issue.native and issue.thread != evidence.of(rank).main_thread
    ]
    if not helpers or len(helpers) == len(calls):
        return []
    return [
        f"observed: {ranks_text(helpers)} called it on a helper thread, the others on the main thread",
        "inferred: two threads of a rank use one group, and no order holds between them",
    ]


def _grouped(calls: Iterable[tuple[int, Issue]]) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for rank, issue in sorted(calls):
        step = f", step {issue.step}" if issue.step >= 0 else ""
        grouped.setdefault(issue.describe() + step, []).append(rank)
    return grouped


def _consequence(divergence: Divergence) -> str:
    if divergence.kind == "dtype":
        return (
            "inferred: where the sizes in bytes agree, the backend does not notice and every result is a mixture of "
            "different values; where they differ, it may abort or wait"
        )
    if divergence.kind == "reduction":
        return "inferred: the backend does not notice; the results are neither the one nor the other, on every rank"
    if divergence.kind == "crossed":
        return "inferred: the backend does not notice; every result of these calls is a mixture of different values"
    if divergence.kind == "root" and not divergence.stuck:
        return "inferred: the backend does not notice; the ranks hold the values of different roots from here on"
    if divergence.kind == "root":
        return "inferred: a rank waits for a root that does not send, or sends to one that does not receive"
    if divergence.kind == "shifted":
        return "inferred: from here on every collective of this group pairs values of different steps"
    if divergence.kind == "shape" and all(map(divergence.table.passed, divergence.calls.values())):
        return "inferred: the backend did not notice; a tensor is filled in part, or holds what is not its own"
    if divergence.kind == "shape":
        return "inferred: one rank aborts or all of them wait; the call cannot complete"
    return "inferred: each rank waits for a call that the others will not make; this cannot resolve itself"


def _tensor(issue: Issue) -> str | None:
    return f"{issue.dtype}[{', '.join(map(str, issue.shape))}]" if issue.shape and issue.dtype != "none" else None


def _swallowed_before(evidence: Evidence, divergence: Divergence) -> tuple[int, CaughtException] | None:
    suspects = divergence.guilty or tuple(divergence.calls)
    for rank in suspects:
        record = last_swallowed(evidence, rank, before=divergence.calls[rank].t)
        if record is not None:
            return rank, record
    # With two ranks, history may blame the one that behaved as usual. The rank that skipped a call is ahead in steps.
    behind = min((divergence.calls[rank].step for rank in suspects), default=-1)
    for rank, issue in divergence.calls.items():
        if rank not in suspects and issue.step > behind:
            record = last_swallowed(evidence, rank, before=issue.t)
            if record is not None and record.during in _IN_STEP:
                return rank, record
    return None
