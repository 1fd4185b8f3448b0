"""Rules on numbers that are not finite: MC401 to MC409, from what the ranks found out when they replayed the step.

A rank writes a `nonfinite` event only where its own pass went wrong; whoever merely received its gradients is a victim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from model_check.diagnose.branches import conditions_of
from model_check.diagnose.catalogue import CATALOGUE
from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence, RankEvidence
from model_check.diagnose.findings import ended_by_text, make_finding
from model_check.record import Finding
from model_check.record.events.numerics import (
    GuardFailed,
    Losses,
    ModuleRange,
    NonFinite,
    NonFiniteReceived,
    Range,
)
from model_check.record.stacks import Frame
from model_check.record.verdict import Certainty, Severity

_RANGES_SHOWN = 3
_OF_NUMBERS = re.compile(r"(?i)\bnans?\b|isnan|\binf\b|isinf|infinit|finite|diverge")  # in the script's own words
_LEFT_OUT = ("skip", "rollback")
_LOST_STEPS = 3  # in a row, before we say that a run stopped training
_STOP_AT_ONCE = "run again with --guard halt: the job then ends at the first such step, before its weights are spoilt"
_EXPLAINED_SKIPS = 3  # by our own trainer, of all the steps it leaves out
NONFINITE = frozenset(f"MC4{number:02d}" for number in range(1, 10))
E = TypeVar("E", bound=NonFinite | NonFiniteReceived)
_Told = tuple[int, NonFinite]
"""A rank, and what it wrote."""


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
    for told in rank.happened(Losses):
        for step, loss in zip(told.steps, told.values, strict=False):
            if math.isfinite(loss):
                bad.clear()
            else:
                bad.append(step)
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
    at_first = [told for _, told in _told(evidence, NonFinite) if told.step == finding.step]
    harmless = bool(at_first) and all(not told.spoils or told.action in _LEFT_OUT for told in at_first)
    if crash.step <= finding.step + 1 and not harmless:
        return True
    said = [str(fact) for fact in crash.facts.values()]
    file, _, line = str(crash.location or "").rpartition(":")
    if file and line.isdigit():
        root = evidence.of(crash.ranks[0]).cwd if crash.ranks else ""
        said += conditions_of(Frame(file, int(line), crash.function or "", root=root))
    return any(_OF_NUMBERS.search(text) for text in said)


def _told(evidence: Evidence, kind: type[E]) -> list[tuple[int, E]]:
    """What each rank said, but for what it only said until it knew more, and for how it seemed to end and did not."""
    told: list[tuple[int, E]] = []
    for rank in evidence.ranks.values():
        goes_on = rank.exit.ok if rank.exit is not None else evidence.live and not rank.exceptions
        known: list[NonFinite | NonFiniteReceived]
        known = [*rank.happened(NonFinite), *rank.happened(NonFiniteReceived)]
        final = {event.step for event in known if not event.preliminary}
        for event in rank.happened(kind):
            if not (goes_on and event.action == "stopped") and not (event.preliminary and event.step in final):
                told.append((rank.rank, event))
    return told


def nonfinite_findings(evidence: Evidence) -> list[Finding]:
    everything = _told(evidence, NonFinite)
    unsure = {event.step for _, event in _told(evidence, NonFiniteReceived) if event.clean is False}
    told = [
        (rank, _without_blame(event) if event.step in unsure else event)
        for rank, event in everything
        if not _infected(rank, event, everything)
    ]
    causes = [event for _, event in told if not _met_a_bad_weight(event)]
    applied = [event.step for event in causes if event.action == "observe" and event.spoils]
    seen: dict[tuple[str, str], list[_Told]] = {}
    for rank, event in told:
        if min(applied, default=event.step) < event.step:
            continue  # the step that spoilt the weights is known, and every later one says the same
        if _met_a_bad_weight(event) and any(_came_before(cause, event.step) for cause in causes):
            continue
        seen.setdefault((_code(event), event.location or event.module or ""), []).append((rank, event))
    found = [_finding(evidence, code, events) for (code, _), events in seen.items()]
    return sorted(found, key=lambda f: f.step or 0)


def received_findings(evidence: Evidence) -> list[Finding]:
    """Every rank had bad gradients and none found its own pass at fault: the job is told, and no rank is blamed."""
    told = _told(evidence, NonFiniteReceived)
    if not told or (evidence.live and len({rank for rank, _ in told}) < len(evidence.all_ranks)):
        return []  # the rank that made it may still be looking into its own pass
    step = min(event.step for _, event in told)
    first = sorted(((rank, event) for rank, event in told if event.step == step), key=lambda item: item[0])
    rank, event = first[0]
    why = event.why_not or "forward and backward of each rank are finite when run once more"
    return [
        make_finding(
            "MC402",
            f"{CATALOGUE['MC402'].title}, and no rank found it in its own pass",
            ranks=[],
            frame=_frame(event),
            evidence=[
                f"observed: {ranks_text([r for r, _ in first])} had gradients that are not finite; "
                f"rank {rank}'s loss was {event.loss}",
                f"inferred: the operation is not known: {why}",
            ],
            severity="error" if any(seen.action == "halt" for _, seen in told) else "warning",
            step=step,
            phase="backward",
            began=event.t,
            now=evidence.now,
            cause="unknown",
        )
    ]


def _infected(rank: int, event: NonFinite, told: Sequence[_Told]) -> bool:
    """A peer brought a bad number to an exchange of the same step before this rank had one, and it came back to it.

    Each rank sees its own exchanges only. A rank whose own pass makes the number again by itself is guilty anyhow.
    """
    if event.deterministic:
        return False
    for peer, seen in told:
        theirs = seen.brought
        if peer == rank or theirs is None or seen.step != event.step or rank not in theirs.ranks:
            continue
        if event.brought.number > theirs.number if event.brought is not None else theirs.spreads:
            return True
    return False


def _without_blame(event: NonFinite) -> NonFinite:
    """A peer did not look at its own numbers in this step: what came through a pass may have been that peer's."""
    if not event.mixed or event.deterministic:
        return event
    why = "inferred: a peer that did not look at its own numbers in this step may have sent it: no rank is blamed"
    return replace(event, local=False, evidence=(*event.evidence, why))


def _met_a_bad_weight(event: NonFinite) -> bool:
    """All that the rank saw was a weight that had been bad before the step."""
    return event.made_in == "weight"


def _came_before(cause: NonFinite, step: int) -> bool:
    """Whether it can have spoilt a weight that is bad at this step. A backward with a finite loss began with good ones:
    of a step that computes several times, as LBFGS does, it was an earlier pass."""
    return cause.step < step or (cause.step == step and cause.direction == "backward")


def _code(event: NonFinite) -> str:
    return event.cause if event.cause in NONFINITE else "MC401"


def _finding(evidence: Evidence, code: str, told: list[_Told]) -> Finding:
    step = min(event.step for _, event in told)
    at_first = [(rank, event) for rank, event in told if event.step == step]
    _, event = min(at_first, key=lambda item: item[0])
    # A rank that is only the one to report something of the whole job says so: nobody is guilty then.
    ranks = sorted({rank for rank, seen in at_first if seen.local})
    spoils = any(seen.spoils for _, seen in at_first)
    severity: Severity = "error" if any(seen.action == "halt" for _, seen in told) else "warning"
    certainty: Certainty = "observed"
    if code == "MC409":
        certainty = "suspected"
    elif event.deterministic and event.op and code not in ("MC404", "MC405", "MC406", "MC407"):
        certainty = "proven"
    return make_finding(
        code,
        _title(code, ranks, event),
        ranks=ranks,
        victims=[rank for rank in evidence.all_ranks if rank not in ranks] if ranks and spoils else [],
        frame=_frame(event),
        evidence=_sentences(told, event),
        certainty=certainty,
        severity=severity,
        step=step,
        phase=event.direction,
        tensor=event.tensor or None,
        fix=event.fix,
        began=event.t,
        now=evidence.now,
        cause=event.made_in,
        facts=_facts(code, told, event),
    )


def _title(code: str, ranks: list[int], event: NonFinite) -> str:
    who = f" on {ranks_text(ranks)}" if ranks else ""
    place = f" in {event.module}" if event.module else ""
    by = f" ({event.op})" if event.op else ""
    return f"{CATALOGUE[code].title}{place}{by}{who}"


def _frame(event: NonFinite | NonFiniteReceived) -> Frame | None:
    file, _, line = (event.location or "").rpartition(":")
    if not file or not line.isdigit():
        return None
    return Frame(file, int(line), (event.function or "") if isinstance(event, NonFinite) else "")


def _facts(code: str, told: list[_Told], event: NonFinite) -> dict[str, Any]:
    known = {
        "op": event.op,
        "module": event.module,
        "loss": event.loss,
        "grad_norm": event.grad_norm,
        "samples": list(event.sample_ids),
        "dataset_indices": list(event.dataset_ids),
        "steps": sorted({seen.step for _, seen in told}),
        "exchange": event.brought.number if event.brought is not None else None,
        "went_back": _went_back(told),
        **event.facts,
    }
    return {key: value for key, value in known.items() if key in CATALOGUE[code].facts and value not in (None, [])}


def _sentences(told: list[_Told], event: NonFinite) -> list[str]:
    norm = event.grad_norm
    lines = [f"observed: loss {event.loss}" + (f", gradient norm {norm}" if norm is not None else ""), *event.evidence]
    lines += [f"observed: before it, {_range_text(entry)}" for entry in event.ranges[-_RANGES_SHOWN:]]
    if event.sample_ids:
        lines.append(f"observed: samples of the batch {_shortened(event.sample_ids)}")
    for number, index in list(zip(event.sample_ids, event.dataset_ids, strict=False))[:_RANGES_SHOWN]:
        lines.append(f"observed: dataset index {index} (sample {number} of the batch)")
    steps = sorted({seen.step for _, seen in told})
    if len(steps) > 1:
        lines.append(f"observed: again in {len(steps) - 1} later step{'s' if len(steps) > 2 else ''}, last {steps[-1]}")
    if len(steps) >= _EXPLAINED_SKIPS and all(seen.action == "skip" for _, seen in told):
        first = f"the first {_EXPLAINED_SKIPS} skipped steps are explained"
        lines.append(f"inferred: there may be more: {first}, metrics.jsonl marks all")
    if back := _went_back(told):
        often = "once" if len(back) == 1 else f"{len(back)} times"
        lines.append(f"observed: the run went back to a checkpoint {often}, from step {', '.join(map(str, back))}")
    lines += sorted({f"observed: {seen.not_as_asked}" for _, seen in told if seen.not_as_asked})
    lines += sorted({f"observed: tensors are in {seen.dump}" for _, seen in told if seen.dump})
    return lines


def _went_back(told: list[_Told]) -> list[int]:
    """The steps from which our own trainer went back to a checkpoint because of it; every guilty rank tells all."""
    by_rank: dict[int, list[int]] = {}
    for rank, event in told:
        if event.action == "rollback":
            by_rank.setdefault(rank, []).append(event.step)
    return max(by_rank.values(), key=len, default=[])


def _range_text(entry: ModuleRange) -> str:
    def side(values: Range | None) -> str:
        if values is None:
            return "?"
        bad = f", {values.finite:.1%} finite" if values.finite < 1.0 else ""
        return f"max {values.absmax:.3g}, mean {values.mean:.3g}{bad}"

    return f"{entry.module or 'the model'}: in {side(entry.input)}; out {side(entry.output)}"


def _shortened(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more


def left_out_only(evidence: Evidence) -> bool:
    """Every bad step was skipped or taken back, so that no weight has changed by it."""
    return all(event.action in _LEFT_OUT for _, event in _told(evidence, NonFinite))
