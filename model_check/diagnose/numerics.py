"""Rules on numbers that are not finite: MC401 to MC409, from what the ranks found out when they replayed the step.

A rank writes a `nonfinite` event only where its own pass went wrong; whoever merely received its gradients is a victim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from model_check.diagnose.branches import conditions_of
from model_check.diagnose.catalogue import CATALOGUE
from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence, RankEvidence
from model_check.diagnose.findings import ended_by_text, make_finding
from model_check.record import Finding
from model_check.record.events.numerics import GuardFailed
from model_check.record.stacks import Frame
from model_check.record.values import whole
from model_check.record.verdict import Certainty, Severity

_RANGES_SHOWN = 3
_OF_NUMBERS = re.compile(r"(?i)\bnans?\b|isnan|\binf\b|isinf|infinit|finite|diverge")
_NOT_AS_ASKED = "(debug.on_nan)"  # how our own trainer ends the sentence that says why it stops all the same
_LEFT_OUT = ("skip", "rollback")
_LOST_STEPS = 3  # in a row, before we say that a run stopped training
_STOP_AT_ONCE = "run again with --guard halt: the job then ends at the first such step, before its weights are spoilt"
_EXPLAINED_SKIPS = 3  # by our own trainer, of all the steps it leaves out
NONFINITE = frozenset(f"MC4{number:02d}" for number in range(1, 10))


def numerics_findings(evidence: Evidence) -> list[Finding]:
    """One finding for each cause and place, at the first step it was seen; the earliest step first."""
    return _with_lost_steps(evidence, nonfinite_findings(evidence) or received_findings(evidence))


def _with_lost_steps(evidence: Evidence, findings: list[Finding]) -> list[Finding]:
    """Adds to the first finding that the run did not train after it, if the losses show that."""
    lost = [found for rank in evidence.ranks.values() if (found := _bad_to_the_end(rank)) is not None]
    since, last = min(lost, default=(0, 0))
    if not findings or not lost or (findings[0].step or 0) > since:
        return findings
    first = findings[0]
    said = f"observed: the loss of every step from {since} to {last} is not finite: the run no longer trained"
    facts = {**first.facts, "lost_steps": [since, last]}
    fix = [*first.fix, _STOP_AT_ONCE]
    return [replace(first, evidence=[*first.evidence, said], fix=fix, facts=facts), *findings[1:]]


def _bad_to_the_end(rank: RankEvidence) -> tuple[int, int] | None:
    """First and last step of the unbroken series of non-finite losses at the end of a run; None if it is short."""
    bad: list[int] = []
    for record in rank.happened("losses"):
        for step, loss in zip(_list(record.get("steps")), _list(record.get("values")), strict=False):
            if isinstance(loss, (int, float)) and math.isfinite(loss):
                bad.clear()
            else:
                bad.append(whole(step))
    return (bad[0], bad[-1]) if len(bad) >= _LOST_STEPS else None


def unwatched_findings(evidence: Evidence) -> list[Finding]:
    """Where the guard itself has failed: no findings would otherwise be taken for good health."""
    failed = {rank.rank: records[0] for rank in evidence.ranks.values() if (records := rank.happened(GuardFailed))}
    if not failed:
        return []
    said = {record.error for record in failed.values()}
    return [
        make_finding(
            "MC417",
            f"the numbers of {ranks_text(sorted(failed))} are no longer watched",
            ranks=sorted(failed),
            evidence=[f"observed: the guard ended itself after {error}" for error in sorted(said)],
            severity="warning",
        )
    ]


def explains_failure(findings: Iterable[Finding], crash: Finding) -> bool:
    """The rank ended because the guard stopped it: what the guard found is the cause, the exception only tells it."""
    own = "NumericsError" in (crash.facts.get("exception"), crash.facts.get("followed_from"))
    return own and any(f.severity == "error" and f.code in NONFINITE for f in findings)


def stopped_by_it(evidence: Evidence, findings: list[Finding], crash: Finding) -> list[Finding] | None:
    """The findings with the script's own end as what followed from the first: it had seen the bad number, and stopped.

    None where its exception, or its exit, is about something else.
    """
    if not findings or crash.code not in ("MC301", "MC313") or not _followed(evidence, findings[0], crash):
        return None
    first = findings[0]
    victims = {*first.victims, *crash.victims, *crash.ranks} - set(first.ranks) if first.ranks else set()
    end = {"ranks": crash.ranks, "location": crash.location, "function": crash.function, **crash.facts}
    facts = {**first.facts, "ended_by": end, "stranded": crash.victims}
    ended = replace(first, severity="error", victims=sorted(victims), facts=facts)
    ended.evidence = [*first.evidence, *ended_by_text(ended), *crash.evidence[1:]]
    return [ended, *findings[1:]]


def _followed(evidence: Evidence, finding: Finding, crash: Finding) -> bool:
    """In the bad step or the next; after that, and where the step did no harm, by what the end says of itself."""
    if finding.step is None or crash.step is None or crash.step < finding.step:
        return False
    at_first = [record for _, record in _told(evidence) if whole(record.get("step")) == finding.step]
    harmless = bool(at_first) and all(r.get("spoils") is False or r.get("action") in _LEFT_OUT for r in at_first)
    if crash.step <= finding.step + 1 and not harmless:
        return True
    said = [str(fact) for fact in crash.facts.values()]
    file, _, line = str(crash.location or "").rpartition(":")
    if file and line.isdigit():
        root = evidence.of(crash.ranks[0]).cwd if crash.ranks else ""
        said += conditions_of(Frame(file, int(line), crash.function or "", root=root))
    return any(_OF_NUMBERS.search(text) for text in said)


def _told(evidence: Evidence, event: str = "nonfinite") -> list[tuple[int, Mapping[str, Any]]]:
    """What each rank said, but for what it only said until it knew more, and for how it seemed to end and did not."""
    told = []
    for rank in evidence.ranks.values():
        goes_on = rank.exit.ok if rank.exit is not None else evidence.live and not rank.exceptions
        final = {
            whole(record.get("step"))
            for name in ("nonfinite", "nonfinite_received")
            for record in rank.happened(name)
            if not record.get("preliminary")
        }
        said = [r for r in rank.happened(event) if not (goes_on and r.get("action") == "stopped")]
        told += [(rank.rank, r) for r in said if not r.get("preliminary") or whole(r.get("step")) not in final]
    return told


def nonfinite_findings(evidence: Evidence) -> list[Finding]:
    seen: dict[tuple[str, str], list[tuple[int, Mapping[str, Any]]]] = {}
    told = _told(evidence)
    told = [(rank, record) for rank, record in told if not _infected(rank, record, told)]
    received = _told(evidence, "nonfinite_received")
    unsure = {whole(record.get("step")) for _, record in received if record.get("clean") is False}
    told = [(rank, _without_blame(record) if whole(record.get("step")) in unsure else record) for rank, record in told]
    causes = [record for _, record in told if not _spoilt_weight(record)]
    applied = [whole(record.get("step")) for record in causes if _was_applied(record)]
    for rank, record in told:
        step = whole(record.get("step"))
        if min(applied, default=step) < step:
            continue  # the step that spoilt the weights is known, and every later one says the same
        if _spoilt_weight(record) and any(_came_before(cause, step) for cause in causes):
            continue
        key = (_code(record), str(record.get("location") or record.get("module") or ""))
        seen.setdefault(key, []).append((rank, record))
    found = [_finding(evidence, code, records) for (code, _), records in seen.items()]
    return sorted(found, key=lambda f: f.step or 0)


def received_findings(evidence: Evidence) -> list[Finding]:
    """Every rank had bad gradients and none found its own pass at fault: the job is told, and no rank is blamed."""
    told = _told(evidence, "nonfinite_received")
    if not told or (evidence.live and len({rank for rank, _ in told}) < len(evidence.all_ranks)):
        return []  # the rank that made it may still be looking into its own pass
    step = min(whole(record.get("step")) for _, record in told)
    first = [(rank, record) for rank, record in told if whole(record.get("step")) == step]
    rank, record = min(first, key=lambda item: item[0])
    why = str(record.get("why_not") or "forward and backward of each rank are finite when run once more")
    return [
        make_finding(
            "MC402",
            f"{CATALOGUE['MC402'].title}, and no rank found it in its own pass",
            ranks=[],
            frame=_frame(record),
            evidence=[
                f"observed: {ranks_text(sorted(r for r, _ in first))} had gradients that are not finite; "
                f"rank {rank}'s loss was {record.get('loss')}",
                f"inferred: the operation is not known: {why}",
            ],
            severity="error" if any(seen.get("action") == "halt" for _, seen in told) else "warning",
            step=step,
            phase="backward",
            began=_seconds(record),
            now=evidence.now,
        )
    ]


def _infected(rank: int, record: Mapping[str, Any], told: list[tuple[int, Mapping[str, Any]]]) -> bool:
    """A peer brought a bad number to an exchange of the same step before this rank had one, and it came back to it.

    Each rank sees its own exchanges only. A rank whose own pass makes the number again by itself is guilty anyhow.
    """
    if record.get("deterministic"):
        return False
    mine = _brought(record)
    for peer, seen in told:
        theirs = _brought(seen)
        if peer == rank or theirs is None or seen.get("step") != record.get("step") or rank not in theirs[1]:
            continue
        if mine[0] > theirs[0] if mine is not None else theirs[2]:
            return True
    return False


def _without_blame(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A peer did not look at its own numbers in this step: what came through a pass may have been that peer's."""
    if not record.get("mixed") or record.get("deterministic"):
        return record
    why = "inferred: a peer that did not look at its own numbers in this step may have sent it: no rank is blamed"
    return {**record, "local": False, "evidence": [*_list(record.get("evidence")), why]}


def _brought(record: Mapping[str, Any]) -> tuple[int, list[Any], bool] | None:
    """The first exchange that it brought a bad number to: its number in the step, the ranks, does its result spread."""
    said = record.get("brought")
    if not isinstance(said, Mapping) or not isinstance(said.get("number"), int):
        return None
    return said["number"], _list(said.get("ranks")), said.get("spreads") is True


def _spoilt_weight(record: Mapping[str, Any]) -> bool:
    """All that the rank saw was a weight that had been bad before the step."""
    return str(record.get("tensor") or "").startswith("parameter ")


def _came_before(cause: Mapping[str, Any], step: int) -> bool:
    """Whether it can have spoilt a weight that is bad at this step. A backward with a finite loss began with good ones:
    of a step that computes several times, as LBFGS does, it was an earlier pass."""
    seen = whole(cause.get("step"))
    return seen < step or (seen == step and cause.get("direction") == "backward")


def _was_applied(record: Mapping[str, Any]) -> bool:
    """Nobody kept the step from the weights."""
    return record.get("action") == "observe" and record.get("spoils") is not False


def _code(record: Mapping[str, Any]) -> str:
    code = str(record.get("cause") or "")
    return code if code in NONFINITE and code in CATALOGUE else "MC401"


def _finding(evidence: Evidence, code: str, records: list[tuple[int, Mapping[str, Any]]]) -> Finding:
    first_step = min(whole(record.get("step")) for _, record in records)
    at_first = [(rank, record) for rank, record in records if whole(record.get("step")) == first_step]
    _, record = min(at_first, key=lambda item: item[0])
    # A rank that is only the one to report something of the whole job says so: nobody is guilty then.
    ranks = sorted({rank for rank, seen in at_first if seen.get("local") is not False})
    stopped = any(seen.get("action") == "halt" for _, seen in records)
    spoils = any(seen.get("spoils") is not False for _, seen in at_first)
    severity: Severity = "error" if stopped else "warning"
    certainty: Certainty = "proven" if record.get("deterministic") and record.get("op") else "observed"
    if code in ("MC404", "MC405", "MC406", "MC407") and certainty == "proven":
        certainty = "observed"
    if code == "MC409":
        certainty = "suspected"
    return make_finding(
        code,
        _title(code, ranks, record),
        ranks=ranks,
        victims=[rank for rank in evidence.all_ranks if rank not in ranks] if ranks and spoils else [],
        frame=_frame(record),
        evidence=_sentences(records, record),
        certainty=certainty,
        severity=severity,
        step=first_step,
        phase=str(record.get("direction") or "") or None,
        tensor=str(record.get("tensor") or "") or None,
        fix=[str(line) for line in _list(record.get("fix"))],
        began=_seconds(record),
        now=evidence.now,
    )


def _title(code: str, ranks: list[int], record: Mapping[str, Any]) -> str:
    who = f" on {ranks_text(ranks)}" if ranks else ""
    what = CATALOGUE[code].title
    module, op = record.get("module"), record.get("op")
    place = f" in {module}" if module else ""
    by = f" ({op})" if op else ""
    return f"{what}{place}{by}{who}"


def _frame(record: Mapping[str, Any]) -> Frame | None:
    file, _, line = str(record.get("location") or "").rpartition(":")
    if not file or not line.isdigit():
        return None
    return Frame(file=file, line=int(line), function=str(record.get("function") or ""))


def _sentences(records: list[tuple[int, Mapping[str, Any]]], record: Mapping[str, Any]) -> list[str]:
    norm = record.get("grad_norm", "")  # None: the script stopped before there were gradients, or took none
    lines = [f"observed: loss {record.get('loss')}" + (f", gradient norm {norm}" if norm is not None else "")]
    lines += [str(line) for line in _list(record.get("evidence"))]
    for entry in _list(record.get("ranges"))[-_RANGES_SHOWN:]:
        if isinstance(entry, Mapping):
            lines.append(f"observed: before it, {_range_text(entry)}")
    if samples := _list(record.get("sample_ids")):
        lines.append(f"observed: samples of the batch {_shortened(samples)}")
    for number, index in list(zip(samples, _list(record.get("dataset_ids")), strict=False))[:_RANGES_SHOWN]:
        lines.append(f"observed: dataset index {index} (sample {number} of the batch)")
    steps = sorted({whole(seen.get("step")) for _, seen in records})
    if len(steps) > 1:
        lines.append(f"observed: again in {len(steps) - 1} later step{'s' if len(steps) > 2 else ''}, last {steps[-1]}")
    if len(steps) >= _EXPLAINED_SKIPS and all(seen.get("action") == "skip" for _, seen in records):
        first = f"the first {_EXPLAINED_SKIPS} skipped steps are explained"
        lines.append(f"inferred: there may be more: {first}, metrics.jsonl marks all")
    lines += _gone_back(records)
    later = [str(line) for _, seen in records for line in _list(seen.get("evidence"))]
    lines += sorted({line for line in later if line.endswith(_NOT_AS_ASKED)} - set(lines))
    for path in sorted({str(seen.get("dump")) for _, seen in records if seen.get("dump")}):
        lines.append(f"observed: tensors are in {path}")
    return lines


def _gone_back(records: list[tuple[int, Mapping[str, Any]]]) -> list[str]:
    """How often our own trainer went back to a checkpoint because of it; every guilty rank tells all of them."""
    times: dict[int, list[int]] = {}
    for rank, seen in records:
        if seen.get("action") == "rollback":
            times.setdefault(rank, []).append(whole(seen.get("step")))
    steps = max(times.values(), key=len, default=[])
    if not steps:
        return []
    often = "once" if len(steps) == 1 else f"{len(steps)} times"
    return [f"observed: the run went back to a checkpoint {often}, from step {', '.join(map(str, steps))}"]


def _range_text(entry: Mapping[str, Any]) -> str:
    def side(name: str) -> str:
        values = entry.get(name)
        if not isinstance(values, Mapping):
            return "?"
        share = values.get("finite")
        bad = f", {share:.1%} finite" if isinstance(share, float) and share < 1.0 else ""
        return f"max {_number(values.get('absmax'))}, mean {_number(values.get('mean'))}{bad}"

    return f"{entry.get('module') or 'the model'}: in {side('input')}; out {side('output')}"


def _list(value: Any) -> list[Any]:
    """A list from a file that anybody may have written; empty where it is none."""
    return value if isinstance(value, list) else []


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, (int, float)) else str(value)


def _shortened(values: list[Any]) -> str:
    numbers = [str(v) for v in values]
    return ", ".join(numbers[:8]) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def _seconds(record: Mapping[str, Any]) -> float | None:
    t = record.get("t")
    return float(t) if isinstance(t, (int, float)) else None


def left_out_only(evidence: Evidence) -> bool:
    """Every bad step was skipped or taken back, so that no weight has changed by it."""
    return all(record.get("action") in _LEFT_OUT for _, record in _told(evidence))
