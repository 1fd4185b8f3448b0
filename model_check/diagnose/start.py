"""Rules on how a job starts: MC101, MC105, MC106, MC108, MC109. Warnings: the job may well run, just not well."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence, RankEvidence, frame_of
from model_check.diagnose.findings import make_finding
from model_check.record import Finding
from model_check.record.ring import Crumb
from model_check.record.stacks import Frame
from model_check.record.start_marks import last_passed, who_is_where

IMPORT_STORM_S = 8.0
IMPORT_STORM_RANKS = 3
_CODE_KEYS = ("script_sha256", "config_hash", "arguments")
# What differs between ranks of any healthy job.
_IDENTITY_KEYS = frozenset({"t", "event", "kind", "time", "monotonic", "rank", "pid", "host", "local_rank", "script"})
_OWN_ARGUMENT = re.compile(r"--?(local[_-]rank|node[_-]rank|global[_-]rank|rank|device|gpu|machine[_-]rank)(=.*)?")


def start_findings(evidence: Evidence) -> list[Finding]:
    found = [*_differences(evidence), _import_storm(evidence)]
    found.append(_everywhere(evidence, "hub", "MC108", "downloads from the hub on every rank"))
    found.append(_everywhere(evidence, "tracker", "MC109", "starts the experiment tracker on every rank"))
    return [finding for finding in found if finding is not None]


def with_start(evidence: Evidence, causes: list[Finding]) -> list[Finding]:
    """Where the start stopped belongs to whatever stopped it: who is where, by the checkpoints the ranks passed."""
    marks = {rank.rank: passed for rank in evidence.ranks.values() if (passed := last_passed(rank.events))}
    sentence = who_is_where(marks, evidence.now)
    # A rank that raised stands nowhere any more: its own line says it all.
    if causes and sentence is not None and not causes[0].code.startswith("MC3"):
        causes[0].evidence.append(f"observed: {sentence}")
    return causes


def _identity(rank: RankEvidence) -> dict[str, str]:
    """What the rank said about its versions and its configuration, flat."""
    facts: dict[str, str] = {}
    for record in rank.events:
        if record.get("event") in ("versions", "config_hash"):
            for key, value in record.items():
                if isinstance(value, dict):
                    facts.update({str(k): str(v) for k, v in value.items()})
                elif key == "arguments":
                    facts.update(_arguments(value))
                elif key not in _IDENTITY_KEYS:
                    facts[key] = str(value)
    return facts


def _arguments(value: object) -> dict[str, str]:
    """The command line without what a launcher gives each rank of its own; nothing for a spawned child's."""
    words = [str(word) for word in value] if isinstance(value, list) else str(value).split()
    if any("spawn_main" in word or "multiprocessing" in word for word in words):
        return {}
    kept: list[str] = []
    skip_value = False
    for word in words:
        own = _OWN_ARGUMENT.fullmatch(word)
        if own is None and not (skip_value and not word.startswith("-")):
            # The same program in another folder is the same program; what is in it has a hash of its own.
            kept.append(PurePosixPath(word).name if word.startswith("/") else word)
        skip_value = own is not None and own[2] is None
    return {"arguments": " ".join(kept)}


def _differences(evidence: Evidence) -> list[Finding]:
    identities = {rank.rank: _identity(rank) for rank in evidence.ranks.values()}
    identities = {rank: facts for rank, facts in identities.items() if facts}
    if len(identities) < 2:
        return []
    version_lines, code_lines = [], []
    odd_version: set[int] = set()
    odd_code: set[int] = set()
    for key in sorted({key for facts in identities.values() for key in facts}):
        values = {rank: facts[key] for rank, facts in identities.items() if key in facts}
        if len(set(values.values())) < 2:
            continue
        common = Counter(values.values()).most_common(1)[0][0]
        odd = {rank for rank, value in values.items() if value != common}
        said = "; ".join(f"rank {rank}: {value[:120]}" for rank, value in sorted(values.items())[:8])
        if key in _CODE_KEYS:
            what = f"the hash of {_script_name(evidence)}" if key == "script_sha256" else key
            code_lines.append(f"observed: {what} differs: {said}")
            odd_code |= odd
        else:
            version_lines.append(f"observed: {key} differs: {said}")
            odd_version |= odd
    found = []
    if version_lines:
        title = f"{ranks_text(odd_version)} runs other versions than the rest"
        found.append(_differs(evidence, "MC105", title, odd_version, version_lines))
    if code_lines:
        title = f"{ranks_text(odd_code)} runs other code or another configuration than the rest"
        found.append(_differs(evidence, "MC106", title, odd_code, code_lines))
    return found


def _script_name(evidence: Evidence) -> str:
    names = [str(r.header.get("script") or "") for r in evidence.ranks.values()]
    return PurePosixPath(next(filter(None, names), "the script")).name


def _differs(evidence: Evidence, code: str, title: str, odd: Iterable[int], lines: list[str]) -> Finding:
    ranks = sorted(odd)
    return make_finding(
        code,
        title,
        ranks=ranks,
        frame=_init_frame(evidence.of(ranks[0])),
        evidence=lines,
        certainty="observed",
        severity="warning",
        phase="init",
        began=_joined_at(evidence.of(ranks[0])),
        now=evidence.now,
    )


def _init_crumb(rank: RankEvidence) -> Crumb | None:
    return next((c for c in rank.crumbs if c.phase == "init"), None)


def _init_frame(rank: RankEvidence) -> Frame | None:
    crumb = _init_crumb(rank)
    return frame_of(crumb) if crumb is not None and crumb.file else None


def _joined_at(rank: RankEvidence) -> float | None:
    crumb = _init_crumb(rank)
    return crumb.time_ns / 1e9 if crumb is not None else None


def _spans(rank: RankEvidence, phase: str, until: float) -> list[tuple[float, float, Crumb]]:
    """Begin, end and record of each outermost span of a phase; an open one lasts until now."""
    ends = {c.span: c.time_ns / 1e9 for c in rank.crumbs if c.event == "end"}
    spans: list[tuple[float, float, Crumb]] = []
    for crumb in rank.crumbs:
        if crumb.event != "begin" or crumb.phase != phase:
            continue
        begin, end = crumb.time_ns / 1e9, ends.get(crumb.seq, until)
        if not spans or begin >= spans[-1][1]:
            spans.append((begin, end, crumb))
    return spans


def _import_storm(evidence: Evidence) -> Finding | None:
    spans = {rank.rank: _spans(rank, "import", evidence.now) for rank in evidence.ranks.values()}
    spans = {rank: found for rank, found in spans.items() if found}
    cores = evidence.cores or 1
    if len(spans) < IMPORT_STORM_RANKS or len(spans) <= cores:
        return None
    took = {rank: sum(end - begin for begin, end, _ in found) for rank, found in spans.items()}
    latest_begin = max(found[0][0] for found in spans.values())
    earliest_end = min(found[-1][1] for found in spans.values())
    if statistics.median(took.values()) < IMPORT_STORM_S or latest_begin >= earliest_end:
        return None
    slowest = max(took, key=lambda rank: took[rank])
    longest = max(spans[slowest], key=lambda span: span[1] - span[0])[2]
    return make_finding(
        "MC101",
        f"{len(spans)} ranks import the same packages at the same time on {cores} cores",
        ranks=sorted(spans),
        frame=frame_of(longest) if longest.file else None,
        evidence=[
            f"observed: imports took {min(took.values()):.1f} to {max(took.values()):.1f} s per rank, all at once",
            f"observed: the longest one is {longest.detail or 'an import'} on rank {slowest}",
        ],
        severity="warning",
        phase="import",
        began=latest_begin,
        now=evidence.now,
    )


def _everywhere(evidence: Evidence, phase: str, code: str, what: str) -> Finding | None:
    """Something that one rank should do for all is done by all of them."""
    spans = {rank.rank: _spans(rank, phase, evidence.now) for rank in evidence.ranks.values()}
    spans = {rank: found for rank, found in spans.items() if found}
    if evidence.world_size < 2 or len(spans) < evidence.world_size:
        return None
    sites = {found[0][2].site for found in spans.values()}
    first = spans[min(spans)][0][2]
    return make_finding(
        code,
        f"the script {what}",
        ranks=sorted(spans),
        frame=frame_of(first) if first.file else None,
        evidence=[
            f"observed: {len(spans)} of {evidence.world_size} ranks did so, at {', '.join(sorted(sites)) or '?'}"
        ],
        severity="warning",
        phase=phase,
        began=max(found[0][0] for found in spans.values()),
        now=evidence.now,
    )
