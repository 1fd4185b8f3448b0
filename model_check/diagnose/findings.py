"""Makes findings: one place that turns a rule's conclusion into the fields of the contract."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from model_check.diagnose.catalogue import CATALOGUE, COMMON_FACTS
from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence
from model_check.diagnose.waits import Wait
from model_check.record import Finding
from model_check.record.stacks import Frame
from model_check.record.verdict import Certainty, Severity


def make_finding(
    code: str,
    title: str,
    *,
    ranks: Iterable[int],
    evidence: Sequence[str],
    victims: Iterable[int] = (),
    frame: Frame | None = None,
    certainty: Certainty = "observed",
    severity: Severity = "error",
    step: int | None = None,
    phase: str | None = None,
    tensor: str | None = None,
    fix: Sequence[str] = (),
    began: float | None = None,
    now: float | None = None,
    cause: str | None = None,
    caused_by: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Finding:
    """A finding with the catalogue's remedy unless the rule knows a better one."""
    guilty = sorted(set(ranks))
    entry = CATALOGUE[code]
    assert cause is None or cause in entry.causes, f"{code} lists no cause {cause!r}"
    unlisted = set(facts or ()) - entry.facts.keys() - COMMON_FACTS.keys()
    assert not unlisted, f"{code} lists no facts {unlisted}"
    return Finding(
        code=code,
        title=title,
        certainty=certainty,
        severity=severity,
        ranks=guilty,
        victims=sorted(set(victims) - set(guilty)),
        step=step if step is not None and step >= 0 else None,
        phase=phase if phase not in ("", "none") else None,
        location=frame.site if frame is not None and frame.file else None,
        function=frame.function or None if frame is not None else None,
        tensor=tensor,
        evidence=list(evidence),
        fix=list(fix) or list(entry.fix),
        seconds_to_detect=round(now - began, 2) if now is not None and began is not None and now >= began else None,
        cause=cause,
        caused_by=caused_by,
        facts=dict(facts or {}),
    )


def for_its_reader(finding: Finding, *, ours: bool) -> Finding:
    """Replaces the general advice with the catalogue's advice for our own trainer, if this is a run of it."""
    entry = CATALOGUE[finding.code]
    if not ours or not entry.ours or not set(entry.fix) & set(finding.fix):
        return finding
    return replace(finding, fix=[*(line for line in finding.fix if line not in entry.fix), *entry.ours])


def lost_peers_text(lost: Mapping[str, str]) -> list[str]:
    return [f"observed: rank {rank} then lost its peer: {said}" for rank, said in lost.items()]


def ended_by_text(finding: Finding) -> list[str]:
    """How the script ended because of what the finding says; empty where it did not."""
    end = finding.facts.get("ended_by")
    if end is None:
        return []
    who = ranks_text(end["ranks"])
    words = f": {end['message']}" if end.get("message") else f" in `{end['statement']}`" if "statement" in end else ""
    if "exception" in end:
        where = f" at {end['location']} in {end['function']}" if end["location"] else ""
        return [f"observed: {who} then raised {end['exception']}{words}{where}"]
    way = f" through {end['via']}" if "via" in end else ""
    return [f"observed: {who} then exited with code {end['exit_code']}{way}{words}"]


def waiting_text(waits: Mapping[int, Wait], ranks: Iterable[int]) -> list[str]:
    """One sentence per place: "ranks 0 and 2 wait in all_reduce #41 at train.py:40"."""
    places: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        wait = waits.get(rank)
        if wait is not None:
            number = f" number {wait.seq} of group {wait.group or 'default'}" if wait.seq else ""
            where = wait.frame.site if wait.frame is not None else ""
            places.setdefault((wait.what + number, where), []).append(rank)
    return [
        f"observed: {ranks_text(who)} wait{'s' if len(who) == 1 else ''} in {what}" + (f" at {where}" if where else "")
        for (what, where), who in places.items()
    ]


def no_progress_text(evidence: Evidence, rank: int, since: float | None) -> list[str]:
    """Empty where the rank has not been seen to make any: nobody can say since when."""
    return [f"observed: no progress of rank {rank} for {max(0.0, evidence.now - since):.1f} s"] if since else []
