"""Rules on faults that raise nothing and slow nothing.

MC410 replicas that drift apart, MC411 gradients that one rank gets wrong, MC412 one batch for all ranks. Ranks write
sums over the bits of their parameters and of their inputs; here they are compared at equal steps.
Token ids that the embedding has no row for (MC902) are told from the failure that they end in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from model_check.diagnose.catalogue import CATALOGUE
from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence
from model_check.diagnose.findings import make_finding
from model_check.record import Finding
from model_check.record.events.numerics import BatchSums, GradientsDiffer, ParameterSums, TokenRange

SAME_BATCHES = 3  # in a row from the first on; once or twice may be chance, or a warmup
_SHOWN_RANKS = 8
_ALL_BITS = (1 << 64) - 1


@dataclass(frozen=True)
class _Sums:
    """What the ranks of one group wrote at one step: for each name, each rank's number."""

    step: int
    group: tuple[int, ...]
    by_name: Mapping[str, Mapping[int, int]]
    t: float


def drift_findings(evidence: Evidence) -> list[Finding]:
    """The first step at which replicas were seen to differ."""
    checks = _sums(evidence, ParameterSums)
    for number, check in enumerate(checks):
        differing = [name for name, sums in check.by_name.items() if len(set(sums.values())) > 1]
        if differing:
            return [_drift_finding(evidence, check, differing, checks[:number])]
    return []


def _sums(evidence: Evidence, kind: type[ParameterSums] | type[BatchSums]) -> list[_Sums]:
    """By step, the oldest first; a name only where every rank of the group has written it."""
    written: dict[tuple[int, tuple[int, ...]], dict[int, dict[str, int]]] = {}
    latest: dict[tuple[int, tuple[int, ...]], float] = {}
    for rank in evidence.ranks.values():
        for event in rank.happened(kind):
            key = event.step, tuple(sorted(event.group))
            written.setdefault(key, {}).setdefault(rank.rank, {}).update(event.hashes)
            latest[key] = max(latest.get(key, 0.0), event.t)
    found = []
    for (step, group), by_rank in sorted(written.items()):
        if len(group) < 2 or not set(group) <= set(by_rank):
            continue
        names = [name for name in by_rank[group[0]] if all(name in by_rank[member] for member in group)]
        by_name = {name: {member: by_rank[member][name] for member in group} for name in names}
        found.append(_Sums(step, group, by_name, latest[step, group]))
    return found


def _drift_finding(evidence: Evidence, check: _Sums, differing: Sequence[str], before: Sequence[_Sums]) -> Finding:
    name = differing[0]
    odd = _odd_ones(check.by_name[name])
    guilty = odd or check.group
    alike = [earlier.step for earlier in before if earlier.group == check.group and _same(earlier, name)]
    cause = "changed" if alike else "from_the_start" if check.step == 0 or not before else None
    lines = [
        f"observed: at step {check.step} {_by_rank(check.by_name[name])} of the bits of {name}",
        f"observed: {len(differing)} of {len(check.by_name)} parameters compared at this step differ",
    ]
    if alike:
        lines.append(f"observed: it was the same on all ranks at step {alike[-1]}")
    elif check.step == 0:
        lines.append("inferred: the ranks began with different weights: changed after DDP had made them alike")
    elif not before:
        lines.append(
            "inferred: it differed at the first comparison: most likely the ranks began with different weights"
        )
    if not odd:
        few = "two ranks have no majority" if len(guilty) == 2 else "no majority agrees"
        lines.append(f"inferred: {few}: nothing says which of them is right")
    who = f"{ranks_text(guilty)} hold" if len(guilty) > 1 else f"{ranks_text(guilty)} holds"
    nobody = f"{'neither' if len(guilty) == 2 else 'none of them'} can be called wrong"
    return make_finding(
        "MC410",
        f"{who} another value of {name} than its peers" if odd else f"{who} different values of {name}: {nobody}",
        ranks=guilty,
        victims=[member for member in check.group if member not in guilty],
        evidence=lines,
        severity="warning",
        step=check.step,
        tensor=name,
        began=check.t,
        now=evidence.now,
        cause=cause,
        facts={
            "majority": bool(odd),
            "differing": len(differing),
            "compared": len(check.by_name),
            **({"last_alike": alike[-1]} if alike else {}),
        },
    )


def _same(check: _Sums, name: str) -> bool:
    """The parameter, or the part of it that was looked at, was alike then."""
    parameter = name.partition("[")[0]
    sums = [values for label, values in check.by_name.items() if label.partition("[")[0] == parameter]
    return bool(sums) and all(len(set(values.values())) == 1 for values in sums)


def _odd_ones(sums: Mapping[int, int]) -> tuple[int, ...]:
    """Those that differ from more than half of all; none where there is no such majority."""
    common, count = Counter(sums.values()).most_common(1)[0]
    if 2 * count <= len(sums):
        return ()
    return tuple(sorted(rank for rank, value in sums.items() if value != common))


def _by_rank(sums: Mapping[int, int]) -> str:
    shown = ", ".join(f"rank {rank}: {value & _ALL_BITS:x}" for rank, value in sorted(sums.items())[:_SHOWN_RANKS])
    return f"the ranks have other sums ({shown}{', …' if len(sums) > _SHOWN_RANKS else ''})"


def wrong_gradient_findings(evidence: Evidence) -> list[Finding]:
    """The first check in which replicas came to different gradients; every rank wrote the same about it."""
    told = [(rank.rank, event) for rank in evidence.ranks.values() for event in rank.happened(GradientsDiffer)]
    if not told:
        return []
    _, first = min(told, key=lambda item: (item[1].step, item[0]))
    step, name = first.step, first.parameter
    ranks = sorted({rank for rank in first.ranks if rank in evidence.ranks})
    how_far = f"by {first.by:.2g} of its norm" if first.by is not None else "without bounds"
    devices = {rank: event.device for rank, event in told if event.device}
    lines = [f"observed: after step {step} the gradient of {name} differs {how_far}, for one and the same micro-batch"]
    lines += [f"observed: rank {rank} computes on {devices[rank]}" for rank in ranks if rank in devices]
    if not first.alone:
        lines.append("inferred: no majority agrees, so nobody can say which of them is right")
    return [
        make_finding(
            "MC411",
            f"{ranks_text(ranks)} {'computes' if len(ranks) == 1 else 'compute'} "
            f"{'wrong' if first.alone else 'different'} gradients for {name}",
            ranks=ranks,
            victims=[rank for rank in evidence.ranks if rank not in ranks],
            evidence=lines,
            severity="warning",
            step=step,
            tensor=name,
            began=first.t,
            now=evidence.now,
            facts={"majority": first.alone, "by": first.by, "devices": {rank: devices.get(rank, "") for rank in ranks}},
        )
    ]


def same_batch_findings(evidence: Evidence) -> list[Finding]:
    """Replicas that are all given the same inputs, from their first steps on."""
    found = []
    checks = _sums(evidence, BatchSums)
    for group in sorted({check.group for check in checks}):
        steps = [check for check in checks if check.group == group]
        alike = [check for check in steps if _one_batch(check)]
        changing = len({tuple(sorted(_one_rank(check, group[0]))) for check in alike}) == len(alike)
        # The same numbers in step after step are a test of speed, not training.
        if len(alike) >= SAME_BATCHES and len(alike) == len(steps) and changing and _loads_data(evidence, group):
            found.append(_same_batch_finding(evidence, group, alike))
    return found


def _loads_data(evidence: Evidence, group: Iterable[int]) -> bool:
    """Batches come out of a loader: numbers made up on the spot with one seed are a test, and nobody's data."""
    return all(any(crumb.phase == "data" for crumb in evidence.of(rank).crumbs) for rank in group)


def _same_batch_finding(evidence: Evidence, group: tuple[int, ...], alike: Sequence[_Sums]) -> Finding:
    return make_finding(
        "MC412",
        f"{ranks_text(group)} are given the same batch in every step",
        ranks=group,
        evidence=[
            f"observed: the inputs of the model are the same bits on {len(group)} ranks "
            f"in each of the {len(alike)} steps compared, and change from step to step",
            f"inferred: {len(group)} ranks do the work of one",
        ],
        certainty="suspected",
        severity="warning",
        step=alike[0].step,
        phase="data",
        began=alike[SAME_BATCHES - 1].t,
        now=evidence.now,
        facts={"steps": len(alike)},
    )


def _one_batch(check: _Sums) -> bool:
    return bool(check.by_name) and all(len(set(sums.values())) == 1 for sums in check.by_name.values())


def _one_rank(check: _Sums, rank: int) -> Iterator[tuple[str, int]]:
    return ((name, sums[rank]) for name, sums in check.by_name.items())


def name_token_ids(evidence: Evidence, findings: Iterable[Finding]) -> list[Finding]:
    """A failure in which the model was given a token that its embedding has no row for is about that token."""
    return [_with_token(evidence, finding) for finding in findings]


def _with_token(evidence: Evidence, finding: Finding) -> Finding:
    if finding.code not in ("MC301", "MC311"):
        return finding
    said = [(rank, event) for rank in finding.ranks for event in evidence.of(rank).happened(TokenRange)]
    if not said:
        return finding
    rank, event = said[-1]
    largest, rows = event.largest, event.rows
    line = f"observed: rank {rank} was given token id {largest}, and {event.module or 'the embedding'} has {rows} rows"
    return replace(
        finding,
        code="MC902",
        title=f"rank {rank} was given token id {largest}, outside a vocabulary of {rows}",
        tensor=event.module or finding.tensor,
        evidence=[line, *finding.evidence],
        fix=list(CATALOGUE["MC902"].fix),
        cause=None,
        facts={"token": largest, "rows": rows, "module": event.module},
    )
