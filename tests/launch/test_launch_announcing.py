"""What the terminal is told, and what it is not told twice."""

from __future__ import annotations

from dataclasses import replace

from model_check.diagnose import render
from model_check.launch.announcing import Announcements
from model_check.rundir import Finding, Verdict

_STUCK = Finding(
    "MC204",
    "rank 1 is stuck in the data loader",
    certainty="observed",
    severity="warning",
    ranks=[1],
    location="train.py:21",
    evidence=["observed: no progress for 6 s"],
)
_SLOW = replace(_STUCK, code="MC701", title="rank 0 is slow", ranks=[0], location=None)


class Told:
    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.announcements = Announcements(self.verdicts.append)

    def tell(self, *findings: Finding, waited_s: float = 6.0) -> list[list[str]]:
        self.announcements.tell(Verdict(findings=list(findings)), waited_s)
        return [[finding.code for finding in verdict.findings] for verdict in self.verdicts]


def test_a_warning_is_told_once_and_a_new_one_alone() -> None:
    told = Told()
    assert told.tell(_STUCK) == [["MC204"]]
    assert told.tell(_STUCK) == [["MC204"]]
    assert told.tell(_STUCK, _SLOW) == [["MC204"], ["MC701"]]


def test_an_error_waits_for_the_final_verdict() -> None:
    told = Told()
    assert told.tell(replace(_STUCK, severity="error")) == []
    assert not told.announcements.told(_STUCK)


def test_after_a_withdrawal_it_must_last_twice_as_long() -> None:
    told = Told()
    assert not told.announcements.withdraw(10.0), "nothing was told, so there is nothing to take back"
    told.tell(_STUCK)
    assert told.announcements.withdraw(10.0)
    assert not told.announcements.told(_STUCK), "it no longer stands"
    assert told.tell(_STUCK, waited_s=19.9) == [["MC204"]]
    assert told.tell(_STUCK, waited_s=20.0) == [["MC204"], ["MC204"]]


def test_the_final_verdict_repeats_a_finding_only_where_there_is_more_to_tell() -> None:
    told = Told()
    told.tell(_STUCK)
    final = replace(_STUCK, severity="error", evidence=["observed: no progress for 300 s"])
    assert told.announcements.told(final)
    assert not told.announcements.told(replace(final, certainty="proven"))
    assert not told.announcements.told(replace(final, location="train.py:22"))
    assert not told.announcements.told(replace(final, ranks=[0, 1]))
    verdict = Verdict(outcome="failed", exit_code=1, world_size=2, findings=[final, replace(_SLOW, severity="info")])
    first, second, last = render(verdict, told_before=told.announcements.told).split("\n\n")
    assert first == "error[MC204]: rank 1 is stuck in the data loader (as above)"
    assert second.startswith("info[MC701]: rank 0 is slow\n  = observed: no progress for 6 s")
    assert last == "failed, exit code 1: 2 ranks: 1 error, 1 info"
