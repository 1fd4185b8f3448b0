"""The rule on a rank that gave up: its process group has a timeout, and the rank it waited for is still there.

The one that fails is the victim. Whoever had not come to the collective is looked at as any rank that stands still.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from model_check.diagnose.evidence import Evidence
from model_check.diagnose.hang import classify_stuck_rank
from model_check.diagnose.issues import GroupTable, Issue
from model_check.diagnose.waits import Wait
from model_check.record import Finding
from model_check.record.events.crashes import ExceptionEvent

_TIMED_OUT = re.compile(r"tim(ed|es|e) ?out", re.I)


def gave_up_finding(
    evidence: Evidence,
    tables: Sequence[GroupTable],
    number: int,
    exception: ExceptionEvent,
    victims: Sequence[int],
    waits: Mapping[int, Wait],
) -> Finding | None:
    """What held up the rank that timed out; None where nobody who lives was missing from its call."""
    text = exception.message.split("\n")[0]
    last = _last_call(tables, number)
    if last is None or not _TIMED_OUT.search(text):
        return None
    table, issue = last
    absent = [r for r in table.missing(issue.seq) if evidence.stands(r) and not evidence.of(r).exceptions]
    if not absent:
        return None
    others = [rank for rank in victims if rank not in absent]
    finding = classify_stuck_rank(evidence, absent[0], (), waits)
    gave_up = f"observed: rank {number} gave up in {issue.describe()}: {text[:160]}"
    return replace(finding, ranks=absent, victims=others, severity="error", evidence=[gave_up, *finding.evidence])


def _last_call(tables: Sequence[GroupTable], rank: int) -> tuple[GroupTable, Issue] | None:
    """The newest collective of the rank that did not come back."""
    open_calls = [
        (table, issue)
        for table in tables
        for issue in table.issues.get(rank, {}).values()
        if not table.came_back(issue) or issue.native
    ]
    return max(open_calls, key=lambda call: call[1].t, default=None)
