"""The rule for loops over data or steps that end on some ranks only: MC205."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from model_check.diagnose.branches import is_outside, loops_around, rank_branch
from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence, RankEvidence, frame_of, steps_done
from model_check.diagnose.findings import make_finding
from model_check.record import Finding
from model_check.record.ring import Crumb
from model_check.record.stacks import Frame

LOADER_ENDED = "exhausted"
_SAME_STEPS = (
    "agree on the number of steps before the loop: all_reduce(MIN) of the count, and all ranks use the result",
    "cut the data into shards of equal length, or drop the last batches",
    "with DDP: wrap the loop in torch.distributed.algorithms.join.Join",
)


def data_spans(rank: RankEvidence) -> list[Crumb]:
    return [c for c in rank.crumbs if c.phase == "data" and c.event == "end"]


def short_of_data(evidence: Evidence, suspects: Iterable[int], everybody: Iterable[int]) -> list[int]:
    """The suspects whose loader had ended while a peer's, in the same loop, had not; empty where all ended alike."""
    peers = [evidence.of(rank) for rank in everybody]
    return [rank for rank in suspects if any(_ended_before(evidence.of(rank), peer) for peer in peers)]


def _ended_before(rank: RankEvidence, peer: RankEvidence) -> bool:
    """The rank's last loop over data is over, and the peer is still in it."""
    own, theirs = _rounds(rank), _rounds(peer)
    over = next((r for r in reversed(own) if r.over), None)
    if over is None or not theirs or theirs[-1].over or (own[-1] is not over and theirs[-1].site != over.site):
        return False
    # After as many steps the peer has ended it as often: then it is in another round of the loop, or in another loop.
    return sum(r == over for r in theirs) < sum(r == over for r in own)


class _Round(NamedTuple):
    """One call of a loader: where, after how many steps, and whether it was the one that ended its loop."""

    site: str
    step: int
    over: bool


def _rounds(rank: RankEvidence) -> list[_Round]:
    sites = {c.seq: c.site for c in rank.crumbs if c.phase == "data" and c.event == "begin"}
    return [_Round(sites.get(c.span, ""), c.step, c.detail == LOADER_ENDED) for c in data_spans(rank)]


def left_their_loop(evidence: Evidence, stands_at: Mapping[int, Frame | None]) -> list[int]:
    """The ranks that have left the loop in which a peer still makes steps. No frame: the rank has ended."""
    return [rank for rank in stands_at if any(_is_past(evidence, rank, peer, stands_at) for peer in stands_at)]


def _is_past(evidence: Evidence, number: int, other: int, stands_at: Mapping[int, Frame | None]) -> bool:
    rank, peer = evidence.of(number), evidence.of(other)
    loop, here, there = _step_loop(rank), stands_at[number], stands_at[other]
    if loop is None or loop != _step_loop(peer) or there is None:
        return False
    # A rank that skipped a call inside the loop is a step ahead of its peers at the end.
    # If both have finished equally many loops over data, the peer is in the next loop.
    ended = [sum(r.over for r in _rounds(one)) for one in (rank, peer)]
    if not 0 < steps_done(rank) <= steps_done(peer) or (ended[0] and ended[0] == ended[1]):
        return False
    file, lines = loop.frame.file, (loop.frame.line, loop.last)
    left = here is None or (here.file == file and is_outside(here, lines) and rank_branch(here) is None)
    return left and there.file == file and not is_outside(there, lines)


class _Loop(NamedTuple):
    frame: Frame
    last: int


def _step_loop(rank: RankEvidence) -> _Loop | None:
    """The loop around the optimizer step and the pass of the rank's newest step, or around the calls of both."""
    marks = [c for c in rank.crumbs if c.file and (c.event, c.phase) == ("point", "step")][-1:]
    for mark in marks:
        passes = [c for c in rank.crumbs if c.seq < mark.seq and c.phase in ("forward", "backward") and c.file]
        passed = [frame_of(c, rank.cwd) for c in passes[-1:] if c.file == mark.file]
        for loop in loops_around(frame_of(mark, rank.cwd)) if passed else ():
            if not is_outside(passed[0], (loop.first, loop.last)):
                return _Loop(Frame(mark.file, loop.first, mark.function, root=rank.cwd), loop.last)
    return None


def uneven_steps_finding(evidence: Evidence, short: Sequence[int], victims: Iterable[int], facts: list[str]) -> Finding:
    first = evidence.of(min(short))
    loop = _step_loop(first)
    many, its = ("s", "its") if len(short) == 1 else ("", "their")
    return make_finding(
        "MC205",
        f"{ranks_text(short)} left the training loop after {steps_done(first)} steps while other ranks go on",
        ranks=short,
        victims=victims,
        frame=loop.frame if loop is not None else None,
        evidence=[
            *(f"observed: rank {rank} left the loop after {steps_done(evidence.of(rank))} steps" for rank in short),
            *facts,
            f"inferred: {ranks_text(short)} end{many} earlier because of {its} own count or data, or skip{many} steps",
        ],
        certainty="proven",
        step=first.step,
        phase="step",
        fix=_SAME_STEPS,
        began=first.last_progress_t,
        now=evidence.now,
        cause="steps",
        facts={"steps": steps_done(first)},
    )


def loader_frame(rank: RankEvidence) -> Frame | None:
    crumb = next((c for c in reversed(rank.crumbs) if c.phase == "data" and c.file), None)
    return Frame(crumb.file, crumb.line, crumb.function) if crumb is not None else rank.last_site()


def _loop_of(rank: RankEvidence, end: Crumb | None) -> Frame | None:
    """Where the loop over data stands that ended with this record."""
    begin = next((c for c in rank.crumbs if end is not None and c.seq == end.span and c.file), None)
    return frame_of(begin, rank.cwd) if begin is not None else None


def uneven_finding(evidence: Evidence, short: Iterable[int], victims: Iterable[int], facts: list[str]) -> Finding:
    ranks = sorted(short)
    first = evidence.of(ranks[0])
    counted = [
        f"rank {r.rank}: {len([c for c in r.crumbs if c.phase == 'step' and c.event == 'point'])} steps"
        for r in evidence.ranks.values()
    ]
    who = ranks_text(ranks)
    last = next((c for c in reversed(data_spans(first)) if c.detail == LOADER_ENDED), None)
    return make_finding(
        "MC205",
        f"{who} ran out of data while other ranks still have some",
        ranks=ranks,
        victims=victims,
        frame=_loop_of(first, last) or loader_frame(first),
        evidence=[
            f"observed: the loader of {who} ended at step {last.step if last is not None else first.step}",
            f"observed: steps still in the black boxes: {'; '.join(counted)}",
            *facts,
        ],
        certainty="proven",
        step=first.step,
        phase="data",
        began=last.time_ns / 1e9 if last is not None else None,
        now=evidence.now,
        cause="data",
        facts={"steps": steps_done(first)},
    )
