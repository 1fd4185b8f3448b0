"""Which findings the terminal has already seen: each is told once, and again only when there is more to tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import NamedTuple

from model_check.record import Finding, Verdict
from model_check.supervise.waiting import waits_for_it

_Key = tuple[str, tuple[int, ...], str | None]  # what makes a finding the same one: code, ranks, location
# Trends that may end while the job goes on, with what is said then. Their line is whichever ran when they were seen.
_MAY_END = {"MC705": "the memory of rank {} grows no longer"}
_GONE_FOR_GOOD_S = 5.0
_MOST_RETURNS = 1  # of a trend that comes and goes; the last verdict has it in any case
_EXPLAIN_ALL = ("MC2", "MC3", "MC40", "MC5", "MC6")  # beside one of these no trend is looked for


class CalmLine(NamedTuple):
    """Said while ranks wait and nothing is wrong."""

    about: Hashable  # the same for two lines that differ only in the seconds
    text: str


def calm_line(finding: Finding) -> CalmLine:
    """What the ranks wait for, if the finding on the stall is that nothing is wrong."""
    about = (finding.code, tuple(finding.ranks), finding.phase, finding.function)
    return CalmLine(about, waits_for_it(finding.title, len(finding.victims)))


def _key(finding: Finding) -> _Key:
    return finding.code, tuple(finding.ranks), None if finding.code in _MAY_END else finding.location


def _explains_all(finding: Finding) -> bool:
    return finding.severity == "error" or finding.code.startswith(_EXPLAIN_ALL)


class Announcements:
    """Tells warnings while the job runs. An error is shown by whoever ends the job, with the final verdict."""

    def __init__(self, show: Callable[[Verdict], None]) -> None:
        self._show = show
        self._certainty_told: dict[_Key, str] = {}
        self._patience_s: dict[_Key, float] = {}
        self._missing_since: dict[_Key, float] = {}
        self._calm_patience_s: dict[Hashable, float] = {}
        self._times_ended: Counter[_Key] = Counter()

    def tell(self, verdict: Verdict, waited_s: float) -> None:
        """Shows the warnings that are new. `waited_s`: how long the stall behind them has lasted.

        A warning that was withdrawn before (the long save of every epoch) must last twice as long to be told again.
        """
        fresh = []
        for finding in verdict.findings:
            key = _key(finding)
            due = waited_s >= self._patience_s.get(key, 0.0) and self._times_ended[key] <= _MOST_RETURNS
            if finding.severity == "warning" and key not in self._certainty_told and due:
                self._certainty_told[key] = finding.certainty
                fresh.append(finding)
        if fresh:
            self._show(replace(verdict, findings=fresh))

    def is_news(self, told: CalmLine, waited_s: float) -> bool:
        """Whether a calm line is worth printing: the same one is repeated only for a wait that lasts twice as long."""
        if waited_s < self._calm_patience_s.get(told.about, 0.0):
            return False
        self._calm_patience_s[told.about] = 2 * waited_s
        return True

    def trends_ended(self, verdict: Verdict, now: float, *, last: bool = False) -> list[str]:
        """Takes back the trends that were told and have not been seen for some seconds, or not in the last verdict."""
        standing = {_key(finding) for finding in verdict.findings}
        if any(map(_explains_all, verdict.findings)):
            standing.update(self._certainty_told)
        lines = []
        for key in [key for key in self._certainty_told if key[0] in _MAY_END]:
            if key in standing:
                self._missing_since.pop(key, None)
            elif now - self._missing_since.setdefault(key, now) >= _GONE_FOR_GOOD_S or last:
                del self._certainty_told[key], self._missing_since[key]
                self._times_ended[key] += 1
                lines.append(f"{_MAY_END[key[0]].format(*key[1])}; the warning {key[0]} is withdrawn")
        return lines

    def withdraw(self, after_s: float) -> bool:
        """The stall is over: what was told about it no longer stands. True where anything was told."""
        stood = [key for key in self._certainty_told if key[0] not in _MAY_END]
        for key in stood:
            self._patience_s[key] = max(self._patience_s.get(key, 0.0), 2 * after_s)
            del self._certainty_told[key]
        return bool(stood)

    def told(self, finding: Finding) -> bool:
        """Whether this finding stands in the terminal in full, with no less certainty than it has now."""
        return self._certainty_told.get(_key(finding)) == finding.certainty
