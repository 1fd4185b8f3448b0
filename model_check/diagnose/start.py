"""Rules on how a job starts: MC101, MC105, MC106, MC108, MC109. Warnings: the job may well run, just not well."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence, RankEvidence, frame_of
from model_check.diagnose.findings import make_finding
from model_check.record import Finding
from model_check.record.events.process import Versions
from model_check.record.ring import Crumb
from model_check.record.start_marks import last_passed, who_is_where

IMPORT_STORM_S = 8.0
IMPORT_STORM_RANKS = 3
_OWN_ARGUMENT = re.compile(r"--?(local[_-]rank|node[_-]rank|global[_-]rank|rank|device|gpu|machine[_-]rank)(=.*)?")


def start_findings(evidence: Evidence) -> list[Finding]:
    found = [*_differences(evidence), _import_storm(evidence)]
    found.append(_everywhere(evidence, "hub", "MC108", "downloads from the hub on every rank"))
    found.append(_everywhere(evidence, "tracker", "MC109", "starts the experiment tracker on every rank"))
    return [finding for finding in found if finding is not None]


def with_start(evidence: Evidence, causes: list[Finding]) -> list[Finding]:
    """Where the start stopped belongs to whatever stopped it: who is where, by the checkpoints the ranks passed."""
    marks = {rank.rank: passed for rank in evidence.ranks.values() if (passed := last_passed(rank.told))}
    sentence = who_is_where(marks, evidence.now)
    # A rank that raised stands nowhere any more: its own line says it all.
    if causes and sentence is not None and not causes[0].code.startswith("MC3"):
        causes[0].evidence.append(f"observed: {sentence}")
    return causes


def _arguments(words: Sequence[str]) -> str:
    """The command line without what a launcher gives each rank of its own; empty for a spawned child's."""
    if any("spawn_main" in word or "multiprocessing" in word for word in words):
        return ""
    kept: list[str] = []
    skip_value = False
    for word in words:
        own = _OWN_ARGUMENT.fullmatch(word)
        if own is None and not (skip_value and not word.startswith("-")):
            # The same program in another folder is the same program; what is in it has a hash of its own.
            kept.append(PurePosixPath(word).name if word.startswith("/") else word)
        skip_value = own is not None and own[2] is None
    return " ".join(kept)


def _differences(evidence: Evidence) -> list[Finding]:
    told = {rank.rank: said[-1] for rank in evidence.ranks.values() if (said := rank.happened(Versions))}
    versions = {
        "python": {rank: said.python for rank, said in told.items()},
        "torch": {rank: said.torch for rank, said in told.items()},
        "cuda": {rank: said.cuda or "" for rank, said in told.items()},
    }
    script = PurePosixPath(next((said.script for said in told.values() if said.script), "the script")).name
    code = {
        "arguments": {rank: _arguments(said.arguments) for rank, said in told.items()},
        f"hash of {script}": {rank: said.script_sha256 or "" for rank, said in told.items()},
    }
    found = [
        _differs(evidence, "MC105", "runs other versions than the rest", versions),
        _differs(evidence, "MC106", "runs other code or another configuration than the rest", code),
    ]
    return [finding for finding in found if finding is not None]


def _differs(evidence: Evidence, code: str, what: str, told: Mapping[str, Mapping[int, str]]) -> Finding | None:
    """`told`: what each rank says of each thing; empty: it says nothing."""
    lines = []
    other: dict[str, dict[int, str]] = {}
    for name, of_ranks in told.items():
        values = {rank: value for rank, value in sorted(of_ranks.items()) if value}
        if len(set(values.values())) < 2:
            continue
        common = Counter(values.values()).most_common(1)[0][0]
        other[name] = {rank: value for rank, value in values.items() if value != common}
        each = "; ".join(f"rank {rank}: {value[:120]}" for rank, value in list(values.items())[:8])
        lines.append(f"observed: {name} differs: {each}")
    if not other:
        return None
    odd = sorted({rank for values in other.values() for rank in values})
    init = _first(evidence.of(odd[0]), "init")
    return make_finding(
        code,
        f"{ranks_text(odd)} {what}",
        ranks=odd,
        frame=frame_of(init) if init is not None else None,
        evidence=lines,
        severity="warning",
        phase="init",
        began=init.time_ns / 1e9 if init is not None else None,
        now=evidence.now,
        facts={"differs": sorted(other), "other": other},
    )


def _first(rank: RankEvidence, phase: str) -> Crumb | None:
    return next((crumb for crumb in rank.crumbs if crumb.phase == phase and crumb.event == "begin"), None)


@dataclass(frozen=True)
class _Import:
    """One outermost import, in seconds of CLOCK_MONOTONIC."""

    begin: float
    end: float  # of one that goes on: now
    crumb: Crumb


def _imports(rank: RankEvidence, now: float) -> list[_Import]:
    ends = {crumb.span: crumb.time_ns / 1e9 for crumb in rank.crumbs if crumb.event == "end"}
    found: list[_Import] = []
    for crumb in rank.crumbs:
        if crumb.event == "begin" and crumb.phase == "import":
            begin = crumb.time_ns / 1e9
            if not found or begin >= found[-1].end:
                found.append(_Import(begin, ends.get(crumb.seq, now), crumb))
    return found


def _import_storm(evidence: Evidence) -> Finding | None:
    imports = {rank.rank: found for rank in evidence.ranks.values() if (found := _imports(rank, evidence.now))}
    cores = evidence.cores or 1
    if len(imports) < IMPORT_STORM_RANKS or len(imports) <= cores:
        return None
    took = {rank: sum(each.end - each.begin for each in found) for rank, found in imports.items()}
    latest_begin = max(found[0].begin for found in imports.values())
    earliest_end = min(found[-1].end for found in imports.values())
    if statistics.median(took.values()) < IMPORT_STORM_S or latest_begin >= earliest_end:
        return None
    slowest = max(took, key=lambda rank: took[rank])
    longest = max(imports[slowest], key=lambda each: each.end - each.begin).crumb
    return make_finding(
        "MC101",
        f"{len(imports)} ranks import the same packages at the same time on {cores} cores",
        ranks=imports,
        frame=frame_of(longest),
        evidence=[
            f"observed: imports took {min(took.values()):.1f} to {max(took.values()):.1f} s per rank, all at once",
            f"observed: the longest one is {longest.detail or 'an import'} on rank {slowest}",
        ],
        facts={"cores": cores, "longest": longest.detail},
        severity="warning",
        phase="import",
        began=latest_begin,
        now=evidence.now,
    )


def _everywhere(evidence: Evidence, phase: str, code: str, what: str) -> Finding | None:
    """Something that one rank should do for all is done by all of them."""
    first = {rank.rank: crumb for rank in evidence.ranks.values() if (crumb := _first(rank, phase)) is not None}
    if evidence.world_size < 2 or len(first) < evidence.world_size:
        return None
    sites = ", ".join(sorted({crumb.site for crumb in first.values()}))
    return make_finding(
        code,
        f"the script {what}",
        ranks=first,
        frame=frame_of(first[min(first)]),
        evidence=[f"observed: {len(first)} of {evidence.world_size} ranks did so, at {sites or '?'}"],
        severity="warning",
        phase=phase,
        began=max(crumb.time_ns / 1e9 for crumb in first.values()),
        now=evidence.now,
    )
