"""Rules on ranks that all wait: a circle, and who closed it (MC218); a call that all are in and none leaves (MC220)."""

from __future__ import annotations

from collections.abc import Mapping

from model_check.diagnose.catalogue import CATALOGUE
from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence
from model_check.diagnose.findings import make_finding, waiting_text
from model_check.diagnose.routine import departures
from model_check.diagnose.waits import Wait
from model_check.rundir import Finding

_BACK_IN_ORDER = "look at the named line: there the rank calls something else than in its earlier steps"


def cycle_finding(evidence: Evidence, cycle: list[int], waits: Mapping[int, Wait]) -> Finding:
    lines = []
    for rank in cycle:
        wait = waits[rank]
        where = f" at {wait.frame.site}" if wait.frame is not None else ""
        group = f" in group {wait.group}" if wait.group else ""
        lines.append(f"observed: rank {rank} waits in {wait.what}{group}{where} for {ranks_text(wait.on)}")
    lines.append("inferred: every rank of the circle needs another one to move first; none can")
    left = departures(evidence, cycle)
    guilty = [departure.rank for departure in left] or cycle
    first = min(guilty)
    title = f"{ranks_text(cycle)} wait for each other in a circle"
    if left:
        title += f", since {ranks_text(guilty)} left {'its' if len(left) == 1 else 'their'} usual order"
        lines += [f"inferred: rank {d.rank} left the order of its own earlier calls: {d.text}" for d in left]
    return make_finding(
        "MC218",
        title,
        ranks=guilty,
        victims=[rank for rank in waits if rank not in guilty],
        frame=left[0].frame if left else waits[first].frame,
        evidence=lines,
        certainty="proven",
        step=evidence.of(first).step,
        phase=waits[first].kind,
        fix=(_BACK_IN_ORDER, *CATALOGUE["MC218"].fix) if left else (),
        began=max(waits[rank].since for rank in cycle),
        now=evidence.now,
    )


def all_wait_finding(evidence: Evidence, waits: Mapping[int, Wait]) -> Finding:
    """Everybody waits, and nobody is known to hold the others up: all have arrived, or the records do not say who."""
    first = min(waits)
    if len({(wait.what, wait.group, wait.seq) for wait in waits.values()}) == 1:
        title = f"every rank is inside {waits[first].what}, and the transfer does not end"
        reasons = ["inferred: the network or a device between the ranks is slow or stuck, not the script"]
        if waits[first].seq:
            reasons.insert(0, "observed: all members of the group have called it with the same signature")
    else:
        title = "the ranks wait in different calls, and none of them goes on"
        reasons = ["inferred: one of these calls waits for a rank that is in another; the records do not say which"]
    return make_finding(
        "MC220",
        title,
        ranks=[],
        victims=sorted(waits),
        frame=waits[first].frame,
        evidence=[*waiting_text(waits, sorted(waits)), *reasons],
        severity="error" if evidence.killed_as_hung else "warning",
        step=evidence.of(first).step,
        phase="collective",
        began=max(wait.since for wait in waits.values()),
        now=evidence.now,
    )
