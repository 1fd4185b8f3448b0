"""The cause that the evidence deserves: each rule on what it must name, and on what it must leave alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from model_check.numerics.causes import TOO_FAST, Situation, StepNumbers, judge_cause
from model_check.numerics.origins import Given, Origin, Site
from model_check.record.events.numerics import Range

SITE = Site("matmul", "layers.1.w2", "model.py:12", "forward", 3)
FORWARD = Origin("forward", SITE, "inf", "float32", (Range(2.0, 0.0, 1.0),))
BACKWARD = replace(FORWARD, direction="backward")
CALM = [StepNumbers(4.0, 1.0, 1e-3)] * 8
NOTHING = Situation(
    origin=FORWARD,
    steps_done=8,
    rate=1e-3,
    before=CALM,
    weight_size=0.02,
    widest_gain=("layers.0.w1.weight", 1.1),
    bad_samples=None,
    batch_samples=4,
    ignored_labels=False,
    scale=None,
    last_good_scale=None,
    reproduced=True,
)


def code_of(**changes: Any) -> str:
    return judge_cause(replace(NOTHING, **changes)).code


def test_without_anything_special_the_pass_decides() -> None:
    assert code_of() == "MC401"
    assert code_of(origin=BACKWARD) == "MC402"
    found = judge_cause(NOTHING)
    expected = "observed: matmul in layers.1.w2 at model.py:12 made infinity (float32) of finite numbers (max 2)"
    assert found.evidence == (expected,)


def test_what_a_replay_does_not_show_again_is_transient() -> None:
    assert code_of(reproduced=False, origin=None) == "MC409"


def test_an_empty_divisor_comes_before_everything_else() -> None:
    cause = judge_cause(replace(NOTHING, origin=replace(FORWARD, empty_divisor=True), ignored_labels=True, rate=1.0))
    assert cause.code == "MC408"
    assert "observed: every label of a batch is -100" in cause.evidence


def test_a_float16_overflow_tells_of_the_rate_behind_it() -> None:
    half = replace(FORWARD, dtype="float16", magnitude=81920.0)
    fast = judge_cause(replace(NOTHING, origin=half, before=[StepNumbers(4.0, 1.0, 1.0)] * 3))
    assert (fast.code, fast.evidence[-2:]) == (
        "MC403",
        ("observed: learning rate 1, 50 times the weights at the start (0.02)", TOO_FAST),
    )
    assert TOO_FAST not in judge_cause(replace(NOTHING, origin=half)).evidence


def test_a_float16_overflow_tells_magnitude_and_scales() -> None:
    half = replace(FORWARD, dtype="float16", magnitude=81920.0)
    cause = judge_cause(replace(NOTHING, origin=half, scale=1024.0, last_good_scale=2048.0))
    assert cause.code == "MC403"
    assert "observed: 81920 in float16, whose largest number is 65504" in cause.evidence
    assert "observed: loss scale 1024, last good scale 2048" in cause.evidence


def test_float16_alone_is_no_overflow() -> None:
    assert code_of(origin=replace(FORWARD, dtype="float16", kind="nan")) == "MC401"
    pole = replace(BACKWARD, dtype="float16", kind="nan")
    assert code_of(origin=pole, scale=1.0) == "MC402", "NaN out of small numbers is a pole"
    assert code_of(origin=replace(pole, kind="inf"), scale=1.0) == "MC403"
    assert code_of(origin=replace(pole, kind="inf", magnitude=math.inf), scale=1.0) == "MC402", "float32 says the same"
    assert code_of(origin=replace(FORWARD, dtype="bfloat16", magnitude=1e39)) == "MC401"


def test_a_weight_that_float16_cannot_hold_is_named() -> None:
    met = replace(FORWARD, dtype="float16", kind="nan", received=True)
    cause = judge_cause(replace(NOTHING, origin=met, scale=1.0, largest_weight=("layers.1.weight", 3.5e5)))
    assert cause.code == "MC403"
    assert any("layers.1.weight holds 350000" in sentence for sentence in cause.evidence)


@pytest.mark.parametrize(
    ("bad", "code"), [([2], "MC404"), ([0, 1, 2], "MC404"), ([], "MC401"), ([0, 1, 2, 3], "MC401")]
)
def test_some_samples_are_a_bad_sample_and_all_are_not(bad: list[int], code: str) -> None:
    assert code_of(bad_samples=bad) == code


def test_what_was_given_is_named() -> None:
    weight = replace(FORWARD, given=Given("parameter", "layers.0.w1.weight"))
    assert code_of(origin=weight) == "MC401"
    assert code_of(origin=replace(FORWARD, given=Given("input", "0"))) == "MC404"


def test_a_rate_of_the_size_of_the_weights() -> None:
    fast = [StepNumbers(4.0, 1.0, 0.5)] * 3
    cause = judge_cause(replace(NOTHING, before=fast, steps_done=3, rate=0.5))
    assert cause.code == "MC405"
    assert "observed: learning rate 0.5, 25 times the weights at the start (0.02)" in cause.evidence
    assert code_of(before=[StepNumbers(4.0, 1.0, 0.005)] * 3, rate=0.005) == "MC401"


def test_a_jump_of_the_rate() -> None:
    jumped = [*CALM, StepNumbers(4.1, 3.0, 0.1)]
    cause = judge_cause(replace(NOTHING, before=jumped, weight_size=None, rate=0.1))
    assert cause.code == "MC405"
    assert "observed: the learning rate went from 0.001 to 0.1 in one step" in cause.evidence


def test_a_warmup_is_no_jump() -> None:
    ramp = [StepNumbers(4.0, 1.0, 1e-6 * 2**n) for n in range(8)]
    assert code_of(before=ramp, weight_size=None) == "MC401"


def test_the_first_steps_and_large_weights_are_an_initialisation() -> None:
    wide = ("layers.0.w1.weight", 80.0)
    cause = judge_cause(replace(NOTHING, steps_done=0, before=[], widest_gain=wide))
    assert cause.code == "MC407"
    assert any("layers.0.w1.weight enlarges what passes through it 80 times" in line for line in cause.evidence)
    assert code_of(steps_done=50, widest_gain=wide) == "MC401", "large weights late are a consequence"


def test_growth_is_shown_with_its_numbers() -> None:
    norms = [3.0, 48.0, 9.2e3, 4.4e8]
    grown = [StepNumbers(4.0, norm, 1e-3) for norm in norms]
    cause = judge_cause(replace(NOTHING, before=grown))
    assert cause.code == "MC406"
    assert "observed: gradient norm 3, 48, 9.2e+03, 4.4e+08 in the steps before" in cause.evidence


@pytest.mark.parametrize("norms", [[1.0, 500.0, 2.0], [1.0, 1.0, 50.0], [1.0, 1e4], [math.inf, 1.0, 1.0]])
def test_a_spike_or_noise_is_no_growth(norms: list[float]) -> None:
    assert code_of(before=[StepNumbers(4.0, norm, 1e-3) for norm in norms]) == "MC401"
