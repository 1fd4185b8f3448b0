"""What the numbers of a long job cost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from model_check.blackbox.box import BOX
from model_check.numerics.trends import Trends


def test_a_million_steps_are_looked_at_a_few_hundred_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look writes a line of up to 14 kB."""
    recorder = SimpleNamespace(steps=0)
    monkeypatch.setattr(BOX, "recorder", recorder)
    trends, looks = Trends(), 0
    for step in range(0, 1_000_001, 50):
        recorder.steps = step
        looks += trends._looking()
    assert 100 < looks < 1000
