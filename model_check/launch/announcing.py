"""Which findings the terminal has already seen: each is told once, and again only when there is more to tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from model_check.rundir import Finding, Verdict

_Key = tuple[str, tuple[int, ...], str | None]  # what makes a finding the same one: code, ranks, location


def _key(finding: Finding) -> _Key:
    return finding.code, tuple(finding.ranks), finding.location


class Announcements:
    """Tells warnings while the job runs. An error is shown by whoever ends the job, with the final verdict."""

    def __init__(self, show: Callable[[Verdict], None]) -> None:
        self._show = show
        self._certainty_told: dict[_Key, str] = {}
        self._patience_s: dict[_Key, float] = {}

    def tell(self, verdict: Verdict, waited_s: float) -> None:
        """Shows the warnings that are new. `waited_s`: how long the stall behind them has lasted.

        A warning that was withdrawn before (the long save of every epoch) must last twice as long to be told again.
        """
        fresh = []
        for finding in verdict.findings:
            key = _key(finding)
            due = waited_s >= self._patience_s.get(key, 0.0)
            if finding.severity == "warning" and key not in self._certainty_told and due:
                self._certainty_told[key] = finding.certainty
                fresh.append(finding)
        if fresh:
            self._show(replace(verdict, findings=fresh))

    def withdraw(self, after_s: float) -> bool:
        """The stall is over: what was told about it no longer stands. True where anything was told."""
        for key in self._certainty_told:
            self._patience_s[key] = max(self._patience_s.get(key, 0.0), 2 * after_s)
        stood = bool(self._certainty_told)
        self._certainty_told.clear()
        return stood

    def told(self, finding: Finding) -> bool:
        """Whether this finding stands in the terminal in full, with no less certainty than it has now."""
        return self._certainty_told.get(_key(finding)) == finding.certainty
