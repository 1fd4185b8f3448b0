"""Runs all rules over the evidence and orders what they find: the verdict.

Root cause first. A crash explains the waiting of its peers, and a mismatch explains the errors it raises, so what
follows from an explanation is not reported beside it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from model_check.diagnose.collectives import Matcher
from model_check.diagnose.crash import crash_findings, find_failures
from model_check.diagnose.evidence import Evidence
from model_check.diagnose.findings import for_its_reader
from model_check.diagnose.hang import hang_findings
from model_check.diagnose.issues import group_tables
from model_check.diagnose.memory import retry_findings
from model_check.diagnose.mismatch import mismatch_findings
from model_check.diagnose.numerics import (
    explains_failure,
    left_out_only,
    numerics_findings,
    stopped_by_it,
    unwatched_findings,
)
from model_check.diagnose.reading import Reader
from model_check.diagnose.silent import drift_findings, name_token_ids, same_batch_findings, wrong_gradient_findings
from model_check.diagnose.slow import slow_findings
from model_check.diagnose.start import start_findings, with_start
from model_check.diagnose.waits import find_waits
from model_check.diagnose.warnings_training import training_warnings
from model_check.record import Finding, RunDir, Verdict
from model_check.record.rank_exits import EXIT_CODE_OF_A_HANG, EXIT_STOPPED_AND_SAVED
from model_check.record.verdict import DetectionTimes, Outcome

_SEVERITY = {"error": 0, "warning": 1, "info": 2}
_CERTAINTY = {"proven": 0, "observed": 1, "suspected": 2}
_NEED_ALL_RECORDS = ("MC2", "MC302", "MC308")  # comparisons of what each rank has called


def examine(run_dir: RunDir, *, live: bool, now: float | None = None) -> Verdict:
    """The verdict on a run directory, from all its files."""
    return Examiner(run_dir).update(live=live, now=now)


class Examiner:
    """Examines one run directory again and again, reading only what is new."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._reader = Reader(run_dir)
        self._matcher = Matcher()
        self._detection_times = DetectionTimes()
        self._previous = Verdict.read(run_dir.verdict) or Verdict()
        for finding in self._previous.findings:
            self._detection_times.settle(finding)

    def update(self, *, live: bool = True, now: float | None = None) -> Verdict:
        evidence = self._reader.read(live=live, now=now)
        verdict = judge(evidence, self._matcher)
        if not live and evidence.ended is None and self._previous.outcome != "running":
            # A launcher that the job brought along has a code of its own, which only the last verdict holds.
            verdict = replace(verdict, outcome=self._previous.outcome, exit_code=self._previous.exit_code)
        for finding in verdict.findings:
            if not live:
                # Nobody was watching, so the files hold no detection time, unless an earlier verdict gave one.
                finding.seconds_to_detect = None
            self._detection_times.settle(finding)
        return verdict


def judge(evidence: Evidence, matcher: Matcher | None = None) -> Verdict:
    """All rules over one reading of the evidence."""
    rules = _Rules()
    found = find_all(evidence, matcher or Matcher(), rules)
    findings = [for_its_reader(finding, ours=evidence.ours) for finding in found]
    outcome, exit_code = _outcome(evidence, findings)
    return Verdict(
        outcome=outcome,
        exit_code=exit_code,
        world_size=evidence.world_size,
        steps_completed=evidence.steps_completed,
        findings=findings,
        notes=[*rules.notes, *_unwritten(evidence), *_unrecorded(evidence)],
    )


def _unrecorded(evidence: Evidence) -> list[str]:
    """Ranks whose recording failed while they trained on: nobody knows what they call since."""
    failed = {rank.rank: rank.header.gave_up for rank in evidence.ranks.values() if rank.header.gave_up}
    return [
        f"recording rank {rank} failed ({why}, see its events): since then no hang and no mismatch can be found"
        for rank, why in failed.items()
    ]


def _unwritten(evidence: Evidence) -> list[str]:
    """Files of ours that a rank could not write and did without."""
    notes = []
    for rank in evidence.ranks.values():
        for name, why in rank.header.unwritten.items():
            notes.append(f"rank {rank.rank} could not write {name} of the run directory: {why}")
    return notes


class _Rules:
    """Runs the rules one by one. A rule that fails leaves a note instead of a finding; the others still run."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def ask(self, rule: Callable[..., list[Finding]], *facts: Any) -> list[Finding]:
        try:
            return rule(*facts)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(at.filename).name}:{at.lineno}"
            self.notes.append(f"the rule {rule.__name__} failed at {where} ({type(error).__name__}: {error})")
            return []


def find_all(evidence: Evidence, matcher: Matcher, rules: _Rules) -> list[Finding]:
    ask = rules.ask
    tables = group_tables(evidence)
    waits = find_waits(evidence, tables)
    all_recorded = not _unrecorded(evidence)
    mismatches = ask(mismatch_findings, evidence, tables, matcher) if all_recorded else []
    crashes = ask(crash_findings, evidence, tables, waits)
    if not all_recorded:
        crashes = [f for f in crashes if not f.code.startswith(_NEED_ALL_RECORDS)]
    numerics = ask(numerics_findings, evidence)
    if crashes and explains_failure(numerics, crashes[0]):
        crashes = []
    elif crashes and (ended := stopped_by_it(evidence, numerics, crashes[0])) is not None:
        numerics, crashes = ended, []
    certain = [f for f in mismatches if f.certainty != "suspected"]
    if certain and crashes and _explains(certain[0], crashes[0]):
        crashes = []
    # A suspicion that the ranks drifted apart stands alone, or is the reason for what happened next.
    stopped = crashes or any(f.severity == "error" for f in numerics)
    hangs = (
        []
        if stopped or not all_recorded or any(f.certainty == "proven" for f in certain)
        else ask(hang_findings, evidence, tables, waits)
    )
    causes = [*crashes, *hangs, *mismatches] if not certain else [*certain, *crashes, *hangs]
    # A step that was left out has done no harm; one that was applied, or that ended the job, explains all else.
    spoilt = bool(numerics) and not left_out_only(evidence)
    slow = [] if causes or spoilt or not all_recorded else ask(slow_findings, evidence)
    quiet = [] if spoilt else [*ask(wrong_gradient_findings, evidence), *ask(drift_findings, evidence)]
    quiet += [] if spoilt or causes else [*ask(same_batch_findings, evidence), *ask(training_warnings, evidence)]
    causes = with_start(evidence, name_token_ids(evidence, causes))
    found = [*numerics, *causes, *ask(start_findings, evidence), *slow, *quiet]
    found += [*ask(retry_findings, evidence), *ask(unwatched_findings, evidence)]
    # A start that took long is over: what slows the job down now comes first.
    return sorted(found, key=lambda f: (_SEVERITY[f.severity], f.code == "MC101", _CERTAINTY[f.certainty]))


def _explains(mismatch: Finding, crash: Finding) -> bool:
    """The failing ranks failed in, or after, the mismatched call."""
    if crash.code in ("MC303", "MC304", "MC305"):
        return False
    concerned = {*mismatch.ranks, *mismatch.victims}
    return concerned.issuperset(crash.ranks)


def _outcome(evidence: Evidence, findings: list[Finding]) -> tuple[Outcome, int | None]:
    exits = [r.exit for r in evidence.ranks.values() if r.exit is not None]
    running = evidence.live and (not exits or len(exits) < len(evidence.ranks))
    if running:
        return "running", None
    guilty = [rank for finding in findings if finding.severity == "error" for rank in finding.ranks]
    own = _own_code(evidence, guilty)
    if evidence.ended is not None:
        # The launcher's last word; the guilty rank's own code goes before the one it made of all of them.
        outcome, made = evidence.ended
        return outcome, own if outcome == "failed" and own is not None else made
    if evidence.stopped == "interrupted":
        return "interrupted", EXIT_STOPPED_AND_SAVED if any(e.code == EXIT_STOPPED_AND_SAVED for e in exits) else None
    failures = sorted(find_failures(evidence), key=lambda f: (f.victim, f.began))
    if (code := _own_code(evidence, [*guilty, *(f.rank.rank for f in failures)])) is not None:
        return "failed", code
    if evidence.stopped is not None or any(
        f.severity == "error" and f.certainty == "proven" and f.code[:3] == "MC2" for f in findings
    ):
        return "failed", EXIT_CODE_OF_A_HANG
    if failures:
        return "failed", 1
    if len(exits) < evidence.world_size or not exits:
        return ("running", None) if evidence.live else ("interrupted", None)
    return "completed", 0


def _own_code(evidence: Evidence, ranks: Iterable[int]) -> int | None:
    """The first code with which one of these ranks failed, or said it would. If we ended a rank, its code is ours."""
    for rank in map(evidence.of, ranks):
        end = rank.exit
        if end is not None and not end.ok and not evidence.ended_by_us(rank.rank):
            return end.exit_code
        if rank.announced_exit.code:
            return rank.announced_exit.code
    return None
