"""A rank that is slow now and then (MC701): it repeatedly holds up the job at one place.

The median of its steps does not show this. Two things tell it from the noise of a busy host: its peers do not stop, and
the stops always lie between the same two records.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from model_check.diagnose.branches import rank_branch
from model_check.diagnose.evidence import WAIT_PHASES, Evidence, RankEvidence, frame_of
from model_check.diagnose.findings import make_finding
from model_check.diagnose.source import enclosing_loop
from model_check.record import Finding
from model_check.record.ring import Crumb
from model_check.record.stacks import Frame

BURSTS = 4
BURST_STEPS = 20  # the first few steps of a job are not representative
BURST_SECONDS = 0.05  # beyond an ordinary step
BURST_RATIO = 3.0
BURST_SHARE = 0.15  # of the job's time
BURST_PEERS = 1 / 3  # a peer may have at most this fraction of the slow rank's stops
BURST_ONE_PLACE = 0.75


@dataclass(frozen=True)
class Stop:
    """The longest time within a step in which the main thread wrote no record and waited for nobody."""

    seconds: float
    before: Crumb  # if the record ends a span, this is the span's beginning, which has the line
    after: Crumb
    phase: str  # of the span around it; empty between spans

    @property
    def place(self) -> tuple[str, str, str]:
        return self.before.site, self.after.site, self.phase


def burst_finding(evidence: Evidence, own: Mapping[int, Mapping[int, float]], whole: float) -> Finding | None:
    """`own`: each rank's own time in each of its newest steps; `whole`: total time of these steps."""
    usual = statistics.median(seconds for steps in own.values() for seconds in steps.values())
    limit = max(BURST_RATIO * usual, usual + BURST_SECONDS)
    long = {rank: [step for step, seconds in steps.items() if seconds > limit] for rank, steps in own.items()}
    slow = max(long, key=lambda rank: len(long[rank]))
    steps = long[slow]
    lost = sum(own[slow][step] - usual for step in steps)
    peers = max((len(found) for rank, found in long.items() if rank != slow), default=0)
    if (
        len(own[slow]) < BURST_STEPS
        or len(steps) < BURSTS
        or peers > BURST_PEERS * len(steps)
        or lost < BURST_SHARE * whole
    ):
        return None
    stops = longest_stops(evidence.of(slow), steps)
    place, count = Counter(stop.place for stop in stops).most_common(1)[0] if stops else (("", "", ""), 0)
    if count < max(BURSTS, BURST_ONE_PLACE * len(steps)):
        return None
    here = [stop for stop in stops if stop.place == place]
    return _finding(evidence, slow, here, [rank for rank in own if rank != slow], len(own[slow]), lost / len(steps))


def _finding(
    evidence: Evidence, slow: int, stops: Sequence[Stop], peers: list[int], steps: int, seconds: float
) -> Finding:
    rank, stop = evidence.of(slow), stops[-1]
    frame = _line_of(rank, stop)
    inside = f"in phase {stop.phase}" if stop.phase else f"between {stop.before.site} and {stop.after.site}"
    return make_finding(
        "MC701",
        f"rank {slow} is a straggler now and then: stops of {1e3 * seconds:.0f} ms in {len(stops)} of {steps} steps",
        ranks=[slow],
        victims=peers,
        frame=frame,
        evidence=[
            f"observed: in {len(stops)} of its newest {steps} steps rank {slow} takes {1e3 * seconds:.0f} ms longer "
            f"than in an ordinary one; its peers do not",
            f"observed: each time it stops {inside}",
            "inferred: all ranks wait for it in these steps",
        ],
        severity="warning",
        step=rank.step,
        phase=stop.phase or None,
        cause="now_and_then",
        facts={"stop_s": round(seconds, 4), "stops": len(stops), "steps": steps},
    )


def longest_stops(rank: RankEvidence, steps: Sequence[int]) -> list[Stop]:
    """The longest stop of each step that still has records."""
    wanted = set(steps)
    begins: dict[int, Crumb] = {}
    open_spans: list[Crumb] = []
    best: dict[int, Stop] = {}
    for crumb, after in pairwise(c for c in rank.crumbs if c.thread == rank.main_thread):
        before = crumb
        if crumb.event == "begin":
            begins[crumb.seq] = crumb
            open_spans.append(crumb)
        elif crumb.event == "end" and (begun := begins.pop(crumb.span, None)) is not None:
            before = begun
            open_spans = [span for span in open_spans if span.seq != crumb.span]
        around = open_spans[-1].phase if open_spans else ""
        seconds = (after.time_ns - crumb.time_ns) / 1e9
        known = best.get(after.step)
        if after.step in wanted and around not in WAIT_PHASES and (known is None or seconds > known.seconds):
            best[after.step] = Stop(seconds, before, begins.get(after.span, after), around)
    return [best[step] for step in steps if step in best]


def _line_of(rank: RankEvidence, stop: Stop) -> Frame | None:
    """The span's own line; between two spans, the line that only this rank reaches."""
    if stop.phase or not stop.after.file:
        return frame_of(stop.before, rank.cwd) if stop.before.file else None
    return line_between(frame_of(stop.before, rank.cwd), frame_of(stop.after, rank.cwd))


def line_between(before: Frame, after: Frame) -> Frame:
    """The first line between two lines of a function that runs under a condition on the rank; else the later line.

    In a loop the later record's line may be above the earlier one.
    """
    if (before.file, before.function) != (after.file, after.function):
        return after
    lines = [*range(before.line + 1, after.line)]
    if after.line <= before.line and (loop := enclosing_loop(before, after.line)) is not None:
        lines = [*range(before.line + 1, loop[1] + 1), *range(loop[0], after.line)]
    around = {branch.site for frame in (before, after) if (branch := rank_branch(frame)) is not None}
    for line in lines:
        frame = Frame(before.file, line, before.function, root=before.root)
        branch = rank_branch(frame)
        if branch is not None and branch.site not in around and not branch.site.endswith(f":{line}"):
            return frame
    return after
