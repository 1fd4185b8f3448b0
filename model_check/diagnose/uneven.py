"""The rule on loaders that end on some ranks only: MC205."""

from __future__ import annotations

from collections.abc import Iterable

from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.evidence import Evidence, RankEvidence
from model_check.diagnose.findings import make_finding
from model_check.diagnose.frames import Frame
from model_check.rundir import Finding
from model_check.rundir.ring import Crumb

LOADER_ENDED = "exhausted"


def data_spans(rank: RankEvidence) -> list[Crumb]:
    return [c for c in rank.crumbs if c.phase == "data" and c.event == "end"]


def ran_out_of_data(rank: RankEvidence) -> bool:
    """The rank's last call of a loader was the one that ended its loop."""
    spans = data_spans(rank)
    if not spans:
        return False
    return spans[-1].detail == LOADER_ENDED


def short_of_data(evidence: Evidence, suspects: Iterable[int], everybody: Iterable[int]) -> list[int]:
    """The suspects whose loader had ended while others of their peers had more; empty where all were served alike."""
    done = [rank for rank in suspects if ran_out_of_data(evidence.of(rank))]
    others = [evidence.of(rank) for rank in everybody if rank not in done]
    return [rank for rank in done if any(not _ended_alike(evidence.of(rank), other) for other in others)]


def _ended_alike(short: RankEvidence, other: RankEvidence) -> bool:
    """The other rank's loader ended after as many steps: it has only gone on to another loop since."""
    own = [c for c in data_spans(short) if c.detail == LOADER_ENDED]
    theirs = [c for c in data_spans(other) if c.detail == LOADER_ENDED]
    if own[-1].step > 0:
        return any(c.step == own[-1].step for c in theirs)
    return len(theirs) >= len(own)


def loader_frame(rank: RankEvidence) -> Frame | None:
    crumb = next((c for c in reversed(rank.crumbs) if c.phase == "data" and c.file), None)
    return Frame(crumb.file, crumb.line, crumb.function) if crumb is not None else rank.last_site()


def uneven_finding(evidence: Evidence, short: Iterable[int], victims: Iterable[int], facts: list[str]) -> Finding:
    ranks = sorted(short)
    first = evidence.of(ranks[0])
    counted = [
        f"rank {r.rank}: {len([c for c in r.crumbs if c.phase == 'step' and c.event == 'point'])} steps"
        for r in evidence.ranks.values()
    ]
    ended = max((c.time_ns for c in data_spans(first)), default=0) / 1e9
    return make_finding(
        "MC205",
        f"{ranks_text(ranks)} ran out of data while other ranks still train",
        ranks=ranks,
        victims=victims,
        frame=loader_frame(first),
        evidence=[
            f"observed: the loader of {ranks_text(ranks)} ended at step {first.step}",
            f"observed: steps still in the black boxes: {'; '.join(counted)}",
            *facts,
        ],
        certainty="proven",
        step=first.step,
        phase="data",
        began=ended or None,
        now=evidence.now,
    )
