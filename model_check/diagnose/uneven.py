"""The rule on loaders that end on some ranks only: MC205."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence, RankEvidence, frame_of
from model_check.diagnose.findings import make_finding
from model_check.diagnose.frames import Frame
from model_check.rundir import Finding
from model_check.rundir.ring import Crumb

LOADER_ENDED = "exhausted"


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
    )
