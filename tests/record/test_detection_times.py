"""The seconds to detect a fault are those of its first naming."""

from __future__ import annotations

from model_check.record import Finding
from model_check.record.verdict import DetectionTimes


def _settled(times: DetectionTimes, rank: int, said: float | None, otherwise: float | None = None) -> float | None:
    finding = Finding("MC301", "rank raised", ranks=[rank], seconds_to_detect=said)
    times.settle(finding, otherwise)
    return finding.seconds_to_detect


def test_the_first_naming_of_each_fault_counts() -> None:
    times = DetectionTimes()
    assert _settled(times, 0, None) is None
    assert _settled(times, 0, 0.5, otherwise=9.0) == 0.5
    assert [_settled(times, 0, said, otherwise=7.0) for said in (3.0, None)] == [0.5, 0.5]
    assert _settled(times, 1, None, otherwise=1.23456) == 1.235
