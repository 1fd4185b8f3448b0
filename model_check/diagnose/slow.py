"""Rules on jobs that run, but slower than they should: MC701, MC702, MC704, MC705.

Wall time cannot name a straggler, since the collective makes all ranks equally slow: what counts is a rank's own time,
the step without the time in which it waited for others.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from model_check.diagnose.bursts import burst_finding
from model_check.diagnose.evidence import (
    P2P_OPS,
    WAIT_PHASES,
    Evidence,
    RankEvidence,
    frame_of,
)
from model_check.diagnose.findings import make_finding
from model_check.record import Finding
from model_check.record.events.memory import Growth
from model_check.record.events.process import LoaderWorker, Samples, Threads
from model_check.record.process_sample import RankSample
from model_check.record.ring import Crumb
from model_check.record.stacks import Frame
from model_check.record.stalls import stall_after_s

NEWEST = 100  # newest steps to look at, for a rank that is slow now and then
NEWEST_STRAGGLER = 20
NEWEST_DATA = 40
STRAGGLER_RATIO = 1.5
STRAGGLER_STEPS = 5
STRAGGLER_SHARE = 0.2
STRAGGLER_SUSTAINED = 0.8
# Below this a busy host's scheduling alone makes ranks differ.
STRAGGLER_SECONDS = 0.01
LOADER_AT_WORK = 0.1  # CPU seconds per second, over all workers of a rank
DATA_BOUND_SHARE = 0.5
DATA_BOUND_STEPS = 10
OVERSUBSCRIBED = 3.0
SATURATED = 0.8
OWN_SHARE = 1 / 3  # of the cores: a job that takes less, with many threads that sleep, is slowed down by others
# Every rank has about this many threads that sleep: of gloo, of autograd, of the allocator and ours.
IDLE_THREADS = 14
LEAK_SAMPLES = 8
# Caches, allocators and queues of loaders fill as evenly as a leak grows, for seconds; the passes of one step, too.
LEAK_SECONDS = 20.0
LEAK_STEPS = 10
LEAK_SHARE = 0.1
LEAK_PAUSED = 0.5  # at most this fraction of the time may lie between steps
LEAK_LATE_HALF = 0.7  # of the rate of the half before it
LEAK_LAST_QUARTER = 0.5  # of the rate of the whole
_GIB = 1 << 30
_OWN_PHASES = ("data", "forward", "backward", "optimizer", "save", "eval", "load")


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank, in seconds: the whole, the part spent waiting for others, and each phase's own time."""

    step: int
    whole: float
    waited: float
    phases: Mapping[str, float]

    @property
    def own(self) -> float:
        return max(0.0, self.whole - self.waited)

    def unexplained(self, backward_floor: float) -> float:
        """Own time, without backward time above the floor (that is waiting) and work that one rank may do alone."""
        alone = sum(self.phases.get(phase, 0.0) for phase in ("save", "eval", "load"))
        return max(0.0, self.own - alone - max(0.0, self.phases.get("backward", 0.0) - backward_floor))


def slow_findings(evidence: Evidence) -> list[Finding]:
    times = {rank.rank: step_times(rank) for rank in evidence.ranks.values()}
    times = {rank: steps for rank, steps in times.items() if len(steps) >= STRAGGLER_STEPS}
    # A rank that hands its results to one other is a pipeline stage: its work is another, not slower.
    stages = any(crumb.op in P2P_OPS for rank in times for crumb in evidence.of(rank).crumbs)
    comparable = len(times) > 1 and not stages
    straggler = (_straggler(evidence, times) or _bursts(evidence, times)) if comparable else None
    leaks = [_leak(evidence, rank) for rank in evidence.ranks.values()]
    found = [straggler, _data_bound(evidence, times), _oversubscribed(evidence), *leaks]
    return [finding for finding in found if finding is not None]


def step_times(rank: RankEvidence) -> list[StepTimes]:
    """The newest whole steps of a rank, oldest first."""
    marks = [i for i, c in enumerate(rank.crumbs) if c.event == "point" and c.phase == "step"][-(NEWEST + 1) :]
    begins: dict[int, Crumb] = {}
    steps = []
    for first, last in pairwise(marks):
        waited, wait_depth = 0.0, 0
        phases: dict[str, float] = {}
        for crumb in rank.crumbs[first : last + 1]:
            if crumb.thread != rank.main_thread:
                continue
            if crumb.event == "begin":
                begins[crumb.seq] = crumb
                wait_depth += crumb.phase in WAIT_PHASES
            elif crumb.event == "end" and (begin := begins.pop(crumb.span, None)) is not None:
                seconds = (crumb.time_ns - begin.time_ns) / 1e9
                if begin.phase in WAIT_PHASES:
                    wait_depth -= 1
                    waited += seconds if wait_depth == 0 else 0.0
                elif begin.phase in _OWN_PHASES:
                    phases[begin.phase] = phases.get(begin.phase, 0.0) + seconds
        whole = (rank.crumbs[last].time_ns - rank.crumbs[first].time_ns) / 1e9
        steps.append(StepTimes(rank.crumbs[last].step, whole, waited, phases))
    return steps


def _median_own(steps: list[StepTimes], backward_floor: float) -> float:
    return statistics.median(max(0.0, s.own - max(0.0, s.phases.get("backward", 0.0) - backward_floor)) for s in steps)


def _median_phase(steps: list[StepTimes], phase: str) -> float:
    return statistics.median(s.phases.get(phase, 0.0) for s in steps)


def _straggler(evidence: Evidence, times: Mapping[int, list[StepTimes]]) -> Finding | None:
    newest = {rank: steps[-NEWEST_STRAGGLER:] for rank, steps in times.items()}
    # The rank whose backward is shortest is the one that nobody kept waiting in it.
    # DDP reduces gradients inside backward, so what a backward takes beyond that is waiting, too.
    floor = min(_median_phase(steps, "backward") for steps in newest.values())
    own = {rank: _median_own(steps, floor) - _loader_wait(evidence, rank, steps) for rank, steps in newest.items()}
    slowest = max(own, key=lambda rank: own[rank])
    others = statistics.median([value for rank, value in own.items() if rank != slowest])
    whole = statistics.median(s.whole for s in newest[slowest])
    gap = own[slowest] - others
    if gap < max(STRAGGLER_SECONDS, STRAGGLER_SHARE * whole) or own[slowest] < STRAGGLER_RATIO * others:
        return None
    loaders = _loader_wait(evidence, slowest, newest[slowest])
    over = [s.own - loaders > STRAGGLER_RATIO * others for s in newest[slowest]]
    if sum(over) < STRAGGLER_SUSTAINED * len(over):
        return None
    rank = evidence.of(slowest)
    phase = _guilty_phase(newest, slowest)
    frame = _hottest(rank, phase) or _phase_frame(rank, phase)
    ratio = own[slowest] / max(others, 1e-4)
    return make_finding(
        "MC701",
        f"rank {slowest} is a straggler: its own work takes {ratio:.1f} times as long as its peers'",
        ranks=[slowest],
        victims=[r for r in times if r != slowest],
        frame=frame,
        evidence=[
            f"observed: own time a step, without waiting: {1e3 * own[slowest]:.1f} ms, its peers {1e3 * others:.1f} ms",
            f"observed: over {len(newest[slowest])} steps; the difference lies in phase {phase or 'between phases'}",
            f"inferred: every step of the job takes {1e3 * gap:.1f} ms longer than it needs to",
        ],
        severity="warning",
        step=rank.step,
        phase=phase,
        cause="every_step",
        facts={"own_s": round(own[slowest], 4), "peers_s": round(others, 4)},
    )


def _loader_wait(evidence: Evidence, number: int, steps: list[StepTimes]) -> float:
    """Time per step that it waits for its loader workers, if they do not compute more than its peers' workers.

    If all loaders are equally slow, the rank whose batch comes last seems to hold up the others, because their next
    batches arrive while they wait for it.
    """
    used = {rank.rank: _worker_cpu(rank) for rank in evidence.ranks.values() if rank.happened(LoaderWorker)}
    own, others = used.get(number), [cpu for rank, cpu in used.items() if rank != number]
    if own is None or not others or own > max(LOADER_AT_WORK, STRAGGLER_RATIO * statistics.median(others)):
        return 0.0
    return _median_phase(steps, "data")


def _worker_cpu(rank: RankEvidence) -> float:
    """CPU seconds per second used by its loader workers."""
    return sum(
        _per_second([(s.t, child.cpu_s) for s in rank.samples[-5:] for child in s.children if child.pid == pid])
        for pid in {worker.worker_pid for worker in rank.happened(LoaderWorker)}
    )


def _per_second(seen: Sequence[tuple[float, float]]) -> float:
    """How fast a count rises, from (time, count), oldest first."""
    seconds = seen[-1][0] - seen[0][0] if seen else 0.0
    return (seen[-1][1] - seen[0][1]) / seconds if seconds > 0 else 0.0


def _bursts(evidence: Evidence, times: Mapping[int, list[StepTimes]]) -> Finding | None:
    """Looks at more steps; saving or evaluating on one rank does not count as slowness."""
    floor = min(_median_phase(steps, "backward") for steps in times.values())
    own = {rank: {s.step: s.unexplained(floor) for s in steps} for rank, steps in times.items()}
    return burst_finding(evidence, own, statistics.median(sum(s.whole for s in steps) for steps in times.values()))


def _guilty_phase(newest: Mapping[int, list[StepTimes]], slowest: int) -> str | None:
    excess = {}
    for phase in _OWN_PHASES:
        if phase == "backward":
            continue
        others = [_median_phase(steps, phase) for rank, steps in newest.items() if rank != slowest]
        excess[phase] = _median_phase(newest[slowest], phase) - statistics.median(others)
    best = max(excess, key=lambda phase: excess[phase])
    return best if excess[best] > 0.001 else None


def _hottest(rank: RankEvidence, phase: str | None) -> Frame | None:
    """The user's line that stacks showed most often; those of a slow start say nothing about the steps."""
    mains = [dump.main for dump in rank.rank_stacks() if dump.main is not None and dump.t >= rank.step_times[0]]
    frames = [frame for main in mains if (frame := main.user_frame) is not None]
    counted = Counter((frame.file, frame.line, frame.function) for frame in frames)
    if phase is None or not counted:
        return None
    (file, line, function), count = counted.most_common(1)[0]
    return Frame(file, line, function) if count > 1 else None


def _phase_frame(rank: RankEvidence, phase: str | None) -> Frame | None:
    crumb = next((c for c in reversed(rank.crumbs) if c.file and (phase is None or c.phase == phase)), None)
    return frame_of(crumb) if crumb is not None else None


def _data_bound(evidence: Evidence, times: Mapping[int, list[StepTimes]]) -> Finding | None:
    shares = {}
    for number, newest in times.items():
        steps = newest[-NEWEST_DATA:]
        whole = sum(s.whole for s in steps)
        if len(steps) >= DATA_BOUND_STEPS and whole > 0:
            shares[number] = sum(s.phases.get("data", 0.0) for s in steps) / whole
    if not shares or min(shares.values()) < DATA_BOUND_SHARE:
        return None
    first = min(shares)
    rank = evidence.of(first)
    return make_finding(
        "MC702",
        f"the data loader takes {100 * statistics.median(shares.values()):.0f} % of every step",
        ranks=sorted(shares),
        frame=_hottest(rank, "data") or _phase_frame(rank, "data"),
        evidence=[
            "observed: share of the step in the loader: "
            + "; ".join(f"rank {r} {100 * v:.0f} %" for r, v in sorted(shares.items())[:8])
        ],
        severity="warning",
        step=rank.step,
        phase="data",
        facts={"share": round(statistics.median(shares.values()), 3)},
    )


def _oversubscribed(evidence: Evidence) -> Finding | None:
    cores = evidence.cores
    if not cores:
        return None
    live = [r for r in evidence.ranks.values() if r.samples and r.step is not None and r.step > 0]
    threads = {r.rank: _compute_threads(r) for r in live}
    total = sum(threads.values())
    if len(threads) < 2 or total < OVERSUBSCRIBED * cores:
        return None
    # Threads alone harm nobody: there must be no processor left for them, whoever uses it.
    used = sum(_recent_cpu(r) for r in live)
    busy = max(used, _machine_cpu(evidence))
    if busy < SATURATED * cores or used < OWN_SHARE * cores:
        return None
    return make_finding(
        "MC704",
        f"{len(threads)} ranks with {total} compute threads compete for {cores} cores",
        ranks=sorted(threads),
        frame=_phase_frame(evidence.of(min(threads)), "forward"),
        evidence=[
            "observed: compute threads, about: " + "; ".join(f"rank {r} {n}" for r, n in sorted(threads.items())[:8]),
            f"observed: {busy:.1f} of {cores} cores are busy, {used:.1f} of them with these ranks",
        ],
        fix=[f"set OMP_NUM_THREADS={max(1, cores // max(1, len(threads)))} for this many ranks on {cores} cores"],
        severity="warning",
        phase="forward",
        facts={"threads": total, "cores": cores},
    )


def _compute_threads(rank: RankEvidence) -> int:
    """Those beyond what every rank has, and no more than torch computes with where the rank said so: others wait."""
    beyond = max(0, rank.samples[-1].threads - IDLE_THREADS)
    said = rank.happened(Threads)
    return min(beyond, said[-1].compute) if said else beyond


def _recent_cpu(rank: RankEvidence) -> float:
    return _per_second([(sample.t, sample.cpu_s) for sample in rank.samples[-5:]])


def _machine_cpu(evidence: Evidence) -> float:
    """How many processors of the machine were busy during the newest samples; 0 where they do not say."""
    looks = evidence.said(Samples)[-5:]
    return _per_second([(look.t, look.machine_cpu_s) for look in looks if look.machine_cpu_s is not None])


def _leak(evidence: Evidence, rank: RankEvidence) -> Finding | None:
    """Memory that climbs at one rate until the newest sample, while steps go on: only then is a forecast honest."""
    if not rank.step_times:
        return None
    # What a rank gives back on its way out says nothing about its training.
    points = [(s.t, float(_held(s))) for s in rank.samples if s.rss and _warmed_up(rank) <= s.t <= rank.step_times[-1]]
    seconds = max(LEAK_SECONDS, LEAK_STEPS * (evidence.median_step_s or 0.0))
    # Behind a cache that filled first a leak shows in the second half alone.
    points = next((part for part in (points, _since(points, 0.5)) if _climbs_steadily(part, seconds)), [])
    if not points or _paused(rank, points, evidence) > LEAK_PAUSED * (points[-1][0] - points[0][0]):
        return None
    slope = _slope(points)
    told = rank.happened(Growth)
    growth = told[-1] if told else None
    frame = Frame(growth.file, growth.line, "", root=rank.cwd) if growth is not None and growth.line > 0 else None
    place = _what_grows(growth) if growth is not None else []
    if frame is not None:
        place.append(f"inferred: {frame.site} is the only line that fills it")
    elif (frame := _phase_frame(rank, "forward")) is not None:
        unknown = "the line that fills it" if growth is not None else "what holds the memory"
        place.append(f"observed: the line is the forward of the step that ran; {unknown} is not known")
    return make_finding(
        "MC705",
        f"the memory of rank {rank.rank} grows by {slope * 3600 / _GIB:.2f} GiB an hour",
        ranks=[rank.rank],
        frame=frame,
        evidence=[
            f"observed: resident memory rose from {points[0][1] / _GIB:.2f} to {points[-1][1] / _GIB:.2f} GiB "
            f"in {points[-1][0] - points[0][0]:.0f} s of training",
            *place,
            _forecast(slope, points[-1][1], evidence),
        ],
        severity="warning",
        step=rank.step,
        facts={
            "gib_per_hour": round(slope * 3600 / _GIB, 3),
            **({"container": growth.container, "name": growth.name, "item": growth.item} if growth is not None else {}),
        },
    )


def _paused(rank: RankEvidence, points: _Points, evidence: Evidence) -> float:
    """Seconds in long gaps between steps: memory that an evaluation or a compilation takes does not grow per step."""
    far = stall_after_s(evidence.median_step_s)
    gaps = [(max(a, points[0][0]), min(b, points[-1][0])) for a, b in pairwise(rank.step_times) if b - a > far]
    return sum(end - begin for begin, end in gaps if end > begin)


def _what_grows(growth: Growth) -> list[str]:
    """The container that grew between the rank's two counts."""
    kind = growth.container
    called = f"`{growth.name}`, a {kind} of {growth.file}," if growth.name else f"a {kind} without a name"
    about = f", about {growth.bytes / (1 << 20):.1f} MiB in all" if growth.bytes else ""
    grew = f"grew from {growth.before} to {growth.now} items in {growth.seconds} s{about}"
    return [f"observed: {called} {grew}", f"observed: its newest item is a {growth.item}"]


def _held(sample: RankSample) -> int:
    """Without the pages of mapped files: a data set that is read through a map is no memory that runs out."""
    return max(0, sample.rss - sample.rss_file)


_Points = list[tuple[float, float]]  # time and bytes


def _since(points: _Points, share: float) -> _Points:
    """Those after this share of the time."""
    return [p for p in points if p[0] >= points[0][0] + share * (points[-1][0] - points[0][0])]


def _slope(points: _Points) -> float:
    return statistics.linear_regression([t for t, _ in points], [held for _, held in points]).slope


def _climbs_steadily(points: _Points, seconds: float) -> bool:
    """In nearly every sample, and at the end no slower than before: what flattens is a cache, and needs no forecast."""
    if len(points) < LEAK_SAMPLES or points[-1][0] - points[0][0] < seconds:
        return False
    rises = sum(b[1] >= a[1] for a, b in pairwise(points)) / (len(points) - 1)
    if points[-1][1] - points[0][1] < LEAK_SHARE * points[0][1] or rises < 0.9:
        return False
    second, last = _since(points, 0.5), _since(points, 0.75)
    first = points[: len(points) - len(second)]
    if min(map(len, (first, second, last))) < 2:
        return False
    return _slope(second) >= LEAK_LATE_HALF * _slope(first) and _slope(last) >= LEAK_LAST_QUARTER * _slope(points)


def _warmed_up(rank: RankEvidence) -> float:
    """When the memory of a healthy rank has stopped growing: 2 s after its first step.

    Where the record of that step is lost (the ring had wrapped before anybody looked) it was before the oldest one
    retained, and the first fifth of what the samples show stands for the start.
    """
    if rank.first_step_t is not None:
        return rank.first_step_t + 2.0
    first, last = rank.samples[0].t, rank.samples[-1].t
    return min(rank.step_times[0] + 2.0, first + 0.2 * (last - first))


def _forecast(slope: float, now: float, evidence: Evidence) -> str:
    """When the host has no more to give, where that is known: all its ranks take from the same memory."""
    held = sum(_held(rank.samples[-1]) for rank in evidence.ranks.values() if rank.samples and rank.alive)
    left = evidence.host_memory - held if evidence.host_memory is not None else 0
    if left > 0:
        rest = f"the {left / _GIB:.1f} GiB that the host has left"
        return f"inferred: at this rate {rest} are used up in {_time(left / slope)}"
    return f"inferred: at this rate it doubles in {_time(now / slope)}"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} hours"
