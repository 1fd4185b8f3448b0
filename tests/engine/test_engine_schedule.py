from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.config.sections import SchedulerSection
from model_check.engine.schedule import rate_factor


def factors(kind: str, warmup: int, steps: int, **options: float) -> list[float]:
    schedule = SchedulerSection(type=kind, warmup_steps=warmup, **options)
    return [rate_factor(step, schedule, steps) for step in range(steps)]


def test_constant_is_one_everywhere() -> None:
    assert factors("constant", 0, 5) == [1.0] * 5


def test_warmup_climbs_linearly_and_reaches_one() -> None:
    assert factors("linear_warmup", 3, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_starts_at_one_and_ends_at_the_minimum() -> None:
    values = factors("cosine", 0, 101, min_ratio=0.1)
    assert values[0] == 1.0
    assert values[50] == pytest.approx(0.55)
    assert values[100] == pytest.approx(0.1)


def test_wsd_is_stable_and_then_decays_to_the_minimum() -> None:
    values = factors("wsd", 2, 20, min_ratio=0.2, decay_fraction=0.25)
    assert values[2:15] == [1.0] * 13
    assert values[15:] == pytest.approx([0.84, 0.68, 0.52, 0.36, 0.2])


@given(
    kind=st.sampled_from(["constant", "linear_warmup", "cosine", "wsd"]),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 200),
    ratio=st.floats(0, 1),
    decay=st.floats(0, 1),
)
def test_every_rate_is_a_share_of_the_peak(kind: str, warmup: int, steps: int, ratio: float, decay: float) -> None:
    for value in factors(kind, warmup, steps, min_ratio=ratio, decay_fraction=decay):
        assert math.isfinite(value) and 0 <= value <= 1 + 1e-12
