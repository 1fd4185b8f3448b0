"""Rules on collectives that do not match: MC201-MC203, MC205-MC208, MC302 where a swallowed exception is behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from model_check.diagnose.collectives import Divergence, Matcher, find_divergence, ranks_text
from model_check.diagnose.evidence import Evidence, RankEvidence
from model_check.diagnose.findings import make_finding
from model_check.diagnose.frames import Frame, innermost_user
from model_check.diagnose.issues import GroupTable, Issue, flight_tables
from model_check.rundir import Finding
from model_check.rundir.ring import Crumb
from model_check.rundir.verdict import Certainty, Severity

LOADER_ENDED = "exhausted"
_STEP_PHASES = frozenset({"data", "forward", "backward", "optimizer"})
_SHORT = {"op": "MC201", "shape": "MC202", "dtype": "MC203", "crossed": "MC208", "shifted": "MC206"}


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
            evidence, rank, record, victims=set(divergence.calls) - {rank}, facts=_calls(divergence)
        )
    if divergence.kind == "op" and (short := _out_of_data(evidence, divergence)):
        return uneven_finding(evidence, short, set(divergence.calls) - set(short), _calls(divergence), proven=True)
    return _plain(evidence, divergence)


def _plain(evidence: Evidence, divergence: Divergence) -> Finding:
    calls, guilty = divergence.calls, divergence.guilty
    code = _code(divergence)
    first = divergence.first_call()
    everybody = sorted(set(divergence.table.members) | set(calls))
    facts = [*_calls(divergence), *([f"inferred: {divergence.blame}"] if divergence.blame else [])]
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
        began=max(issue.t for issue in calls.values()) or None,
        now=evidence.now,
    )


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
    others = next((i for r, i in sorted(divergence.calls.items()) if r not in divergence.guilty), first)
    if not divergence.decided:
        kinds = {"shape": "sizes", "dtype": "dtypes", "crossed": "crossed order"}
        return f"{who} called different {kinds.get(divergence.kind, 'collectives')} at the same place in their order"
    if code == "MC206":
        if first.op in ("barrier", "monitored_barrier") and divergence.kind == "op" and others.op != first.op:
            return f"{first.op} on {who} has no counterpart on the other ranks"
        return f"{who} skipped a collective that the other ranks called"
    if code == "MC207":
        return f"{who} called {'an' if first.op[0] in 'aeiou' else 'a'} {first.op} that no other rank calls"
    if code == "MC202":
        return f"{who} called {first.op} with another size than its peers"
    if code == "MC203":
        return f"{who} called {first.op} with {first.dtype}, its peers with {others.dtype}"
    if code == "MC208":
        return f"{who} call{'s' if one else ''} two collectives of the same size in swapped order"
    return f"{who} called {first.op} where the other ranks called {others.op}"


def _calls(divergence: Divergence) -> list[str]:
    """What every rank called at the place where they part."""
    where = f"collective {divergence.seq} of group {divergence.table.group or 'default'}"
    return [
        f"observed: {where}: {ranks_text(ranks)} called {text}"
        for text, ranks in _grouped(divergence.calls.items()).items()
    ]


def _grouped(calls: Iterable[tuple[int, Issue]]) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for rank, issue in sorted(calls):
        step = f", step {issue.step}" if issue.step >= 0 else ""
        grouped.setdefault(issue.describe() + step, []).append(rank)
    return grouped


def _consequence(divergence: Divergence) -> str:
    if divergence.kind in ("dtype", "crossed"):
        return "inferred: the backend does not notice; every result of these calls is a mixture of different values"
    if divergence.kind == "shifted":
        return "inferred: from here on every collective of this group pairs values of different steps"
    if divergence.kind == "shape":
        return "inferred: one rank aborts or all of them wait; the call cannot complete"
    return "inferred: each rank waits for a call that the others will not make; this cannot resolve itself"


def _tensor(issue: Issue) -> str | None:
    return f"{issue.dtype}[{', '.join(map(str, issue.shape))}]" if issue.shape else None


def _swallowed_before(evidence: Evidence, divergence: Divergence) -> tuple[int, Mapping[str, object]] | None:
    suspects = divergence.guilty or tuple(divergence.calls)
    for rank in suspects:
        record = last_swallowed(evidence, rank, before=divergence.calls[rank].t)
        if record is not None:
            return rank, record
    return None


def last_swallowed(evidence: Evidence, rank: int, before: float = 0.0) -> Mapping[str, object] | None:
    """The newest exception that this rank swallowed and not all its peers did: what all do keeps them together."""

    def kind(record: Mapping[str, object]) -> tuple[object, str]:
        frame = user_frame(record)
        return record.get("type"), frame.site if frame is not None else ""

    peers = [r for r in evidence.ranks.values() if r.rank != rank]
    common = [Counter(kind(record) for record in _caught(peer)) for peer in peers]
    own = _caught(evidence.of(rank))
    counts = Counter(kind(record) for record in own)
    alone = [r for r in own if not common or any(seen[kind(r)] < counts[kind(r)] for seen in common)]
    known = [r for r in alone if not before or _time(r) <= before]
    return known[-1] if known else _left_in_the_ring(evidence, rank, before)


def _caught(rank: RankEvidence) -> list[Mapping[str, object]]:
    """Exceptions from which the script went on, and those whose handler has itself called something recorded."""
    settled = rank.happened("swallowed_exception")
    if rank.exceptions:
        return [*settled]
    known = {_time(record) for record in settled}
    last_call = max((c.time_ns for c in rank.crumbs if c.event == "begin"), default=0) / 1e9
    handled = [r for r in rank.happened("raised") if _time(r) not in known and _time(r) < last_call]
    return [*settled, *handled]


def _left_in_the_ring(evidence: Evidence, rank: int, before: float) -> Mapping[str, object] | None:
    """A recorded call that ended with an exception, after which the rank went on: its handler may still be running."""

    def raised(of: RankEvidence) -> list[Crumb]:
        return [c for c in of.crumbs if c.event == "end" and c.detail.startswith("raised ") and c.phase in _STEP_PHASES]

    own = [c for c in raised(evidence.of(rank)) if not before or c.time_ns / 1e9 <= before]
    others = [len(raised(r)) for r in evidence.ranks.values() if r.rank != rank]
    went_on = bool(own) and evidence.of(rank).crumbs[-1].seq > own[-1].seq
    if not went_on or evidence.of(rank).exceptions or (others and min(others) >= len(own)):
        return None
    kind = own[-1].detail.removeprefix("raised ")
    begin = next((c for c in evidence.of(rank).crumbs if c.seq == own[-1].span), None)
    frame = {"file": begin.file, "line": begin.line, "function": begin.function} if begin is not None else None
    return {
        "type": kind,
        "message": f"left a call of phase {own[-1].phase}",
        "t": own[-1].time_ns / 1e9,
        "user_frame": frame,
    }


def _time(record: Mapping[str, object]) -> float:
    t = record.get("t_raised", record.get("t"))
    return float(t) if isinstance(t, (int, float)) else 0.0


def user_frame(record: Mapping[str, object]) -> Frame | None:
    """The user's innermost frame of an exception record."""
    given = record.get("user_frame")
    if isinstance(given, dict) and given.get("file"):
        return Frame.from_json(given)
    frames = record.get("frames")
    parsed = [Frame.from_json(f) for f in frames if isinstance(f, dict)] if isinstance(frames, list) else []
    return innermost_user(reversed(parsed))


def raised_at(rank: RankEvidence, record: Mapping[str, object]) -> Frame | None:
    """The user's line of an exception; where its frames hold none, the call that the rank was in at that time."""
    frame = user_frame(record)
    if frame is not None:
        return frame
    moment = _time(record) * 1e9
    crumb = next((c for c in reversed(rank.crumbs) if c.file and (not moment or c.time_ns <= moment)), None)
    return Frame(crumb.file, crumb.line, crumb.function, root=rank.cwd) if crumb is not None else None


def swallowed_finding(
    evidence: Evidence, rank: int, record: Mapping[str, object], victims: Iterable[int], facts: list[str]
) -> Finding:
    frame = raised_at(evidence.of(rank), record)
    kind, message = record.get("type", "an exception"), str(record.get("message", "")).split("\n")[0]
    return make_finding(
        "MC302",
        f"rank {rank} swallowed {kind} and drifted away from its peers",
        ranks=[rank],
        victims=victims,
        frame=frame,
        evidence=[
            f"observed: {kind}: {message}" + (f", raised at {frame.site}" if frame is not None else ""),
            "observed: the script caught it and went on; no other rank did the same",
            *facts,
        ],
        certainty="proven",
        step=evidence.of(rank).step,
        phase="exception",
        began=_time(record) or None,
        now=evidence.now,
    )


def data_spans(rank: RankEvidence) -> list[Crumb]:
    return [c for c in rank.crumbs if c.phase == "data" and c.event == "end"]


def ran_out_of_data(rank: RankEvidence) -> bool:
    """The rank's last call of a loader was the one that ended its loop."""
    spans = data_spans(rank)
    if not spans:
        return False
    return spans[-1].detail == LOADER_ENDED


def _out_of_data(evidence: Evidence, divergence: Divergence) -> list[int]:
    """The ranks whose loader had ended, where others still had data."""
    done = [rank for rank in divergence.calls if ran_out_of_data(evidence.of(rank))]
    return done if 0 < len(done) < len(divergence.calls) else []


def loader_frame(rank: RankEvidence) -> Frame | None:
    crumb = next((c for c in reversed(rank.crumbs) if c.phase == "data" and c.file), None)
    return Frame(crumb.file, crumb.line, crumb.function) if crumb is not None else rank.last_site()


def uneven_finding(
    evidence: Evidence, short: Iterable[int], victims: Iterable[int], facts: list[str], *, proven: bool
) -> Finding:
    ranks = sorted(short)
    first = evidence.of(ranks[0])
    counted = [
        f"rank {r.rank}: {len([c for c in r.crumbs if c.phase == 'step' and c.event == 'point'])} steps"
        for r in evidence.ranks.values()
    ]
    ended = max((c.time_ns for c in data_spans(first)), default=0) / 1e9
    return make_finding(
        "MC205",
        f"{ranks_text(ranks)} ran out of data while other ranks still train",
        ranks=ranks,
        victims=victims,
        frame=loader_frame(first),
        evidence=[
            f"observed: the loader of {ranks_text(ranks)} ended at step {first.step}",
            f"observed: steps still in the black boxes: {'; '.join(counted)}",
            *facts,
        ],
        certainty="proven" if proven else "observed",
        severity="error" if proven else "warning",
        step=first.step,
        phase="data",
        began=ended or None,
        now=evidence.now,
    )
