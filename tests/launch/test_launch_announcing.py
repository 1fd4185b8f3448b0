"""What the terminal is told, and what it is not told twice."""

from __future__ import annotations

from dataclasses import replace

from model_check.diagnose import render
from model_check.record import Finding, Verdict
from model_check.supervise.announcements import Announcements, CalmLine

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

_GROWS = replace(_SLOW, code="MC705", title="the memory of rank 0 grows by 3.00 GiB an hour", location="train.py:12")
_TAKEN_BACK = ["the memory of rank 0 grows no longer; the warning MC705 is withdrawn"]


class Told:
    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.announcements = Announcements(self.verdicts.append)

    def tell(self, *findings: Finding, waited_s: float = 6.0) -> list[list[str]]:
        self.announcements.tell(Verdict(findings=list(findings)), waited_s)
        return [[finding.code for finding in verdict.findings] for verdict in self.verdicts]

    def ended(self, *findings: Finding, now: float, last: bool = False) -> list[str]:
        return self.announcements.trends_ended(Verdict(findings=list(findings)), now, last=last)


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


def test_a_trend_is_taken_back_when_it_has_been_gone_for_some_seconds() -> None:
    told = Told()
    assert told.ended(now=100.0) == [], "nothing was told"
    told.tell(_GROWS, _SLOW)
    assert told.tell(replace(_GROWS, location="train.py:40")) == [["MC705", "MC701"]], "its line is not its own"
    assert told.ended(_GROWS, now=100.0) == []
    assert told.ended(now=101.0) == []
    assert told.ended(_GROWS, now=105.0) == [], "it was away for a moment"
    assert told.ended(_SLOW, now=106.0) == []
    assert told.ended(_SLOW, now=110.9) == []
    assert told.ended(_SLOW, now=111.0) == _TAKEN_BACK
    assert told.ended(_SLOW, now=120.0) == [] and not told.announcements.told(_GROWS)


def test_a_trend_that_is_not_in_the_last_verdict_is_taken_back_at_once() -> None:
    told = Told()
    told.tell(_GROWS)
    assert told.ended(_GROWS, now=100.0, last=True) == []
    assert told.ended(now=100.0, last=True) == _TAKEN_BACK


def test_a_trend_that_is_missing_beside_what_explains_all_has_not_ended() -> None:
    told = Told()
    told.tell(_GROWS)
    for other in (_STUCK, replace(_STUCK, code="MC301", severity="error"), replace(_STUCK, code="MC402")):
        assert told.ended(other, now=100.0) == told.ended(other, now=200.0) == []
    assert told.ended(replace(_SLOW, code="MC415"), now=300.0) == []
    assert told.ended(replace(_SLOW, code="MC415"), now=305.0) == _TAKEN_BACK


def test_a_trend_that_comes_and_goes_is_told_twice_at_most() -> None:
    told = Told()
    for told_so_far in ([["MC705"]], [["MC705"]] * 2, [["MC705"]] * 2):
        assert told.tell(_GROWS, waited_s=0.0) == told_so_far
        told.ended(now=100.0, last=True)


def test_a_stall_that_is_over_takes_no_trend_back() -> None:
    told = Told()
    told.tell(_GROWS)
    assert not told.announcements.withdraw(10.0) and told.announcements.told(_GROWS)
    told.tell(_STUCK)
    assert told.announcements.withdraw(10.0) and told.announcements.told(_GROWS)
    assert not told.announcements.told(_STUCK)


def test_a_calm_line_is_said_again_only_for_a_wait_that_lasts_twice_as_long() -> None:
    announcements = Announcements(lambda verdict: None)
    assert announcements.is_news(CalmLine("rank 0 saves", "rank 0 has been saving for 6 s"), 6.0)
    assert not announcements.is_news(CalmLine("rank 0 saves", "rank 0 has been saving for 7 s"), 7.0)
    assert announcements.is_news(CalmLine("rank 1 saves", "rank 1 has been saving for 6 s"), 6.0)
    assert announcements.is_news(CalmLine("rank 0 saves", "rank 0 has been saving for 12 s"), 12.0)
