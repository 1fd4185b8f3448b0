"""Faults that raise nothing: replicas that drift, one batch for all, and warnings before anything breaks."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from staging import Stage

from model_check.diagnose.warnings_training import grows, spike_in
from model_check.record import Finding, JsonlWriter


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def write_sums(stage: Stage, event: str, step: int, *sums: dict[str, int]) -> None:
    for actor, hashes in zip(stage.actors, sums, strict=True):
        actor.event(event, step=step, group=list(range(len(sums))), hashes=hashes)


# Drift


def test_the_rank_that_differs_from_the_majority_is_named_with_the_parameter_and_the_step(stage: Stage) -> None:
    stage.ranks(3)
    stage.train(4)
    for step in (0, 10):
        write_sums(stage, "param_hash", step, *[{"body.weight": 5, "head.weight": 7} for _ in range(3)])
    other = {"body.weight": 5, "head.weight": 8}
    write_sums(stage, "param_hash", 20, {**other, "head.weight": 9}, {**other, "head.weight": 9}, other)
    found = stage.first()
    assert (found.code, found.ranks, found.victims) == ("MC410", [2], [0, 1])
    assert (found.step, found.tensor, found.severity) == (20, "head.weight", "warning")
    assert (found.cause, found.facts["last_alike"], found.facts["majority"]) == ("changed", 10, True)


def test_of_two_ranks_nobody_is_called_the_wrong_one(stage: Stage) -> None:
    stage.ranks(2)
    write_sums(stage, "param_hash", 0, {"w": -4}, {"w": 1 << 62})
    found = stage.first()
    assert (found.code, found.ranks, found.step) == ("MC410", [0, 1], 0)
    assert (found.cause, found.facts["majority"]) == ("from_the_start", False)


def test_only_equal_steps_and_names_are_compared(stage: Stage) -> None:
    first, second = stage.ranks(2)
    first.event("param_hash", step=10, group=[0, 1], hashes={"a": 1, "b": 2})
    second.event("param_hash", step=20, group=[0, 1], hashes={"a": 3, "b": 4})
    second.event("param_hash", step=10, group=[0, 1], hashes={"c": 9, "b": 2})
    assert stage.findings() == []


def test_ranks_outside_the_group_may_hold_what_they_like(stage: Stage) -> None:
    actors = stage.ranks(4)
    for actor in actors:
        group = [0, 1] if actor.rank < 2 else [2, 3]
        actor.event("param_hash", step=0, group=group, hashes={"w": actor.rank // 2})
    assert stage.findings() == []


# The same data everywhere


def test_ranks_that_are_given_the_same_batches_are_told_so(stage: Stage) -> None:
    stage.ranks(2)
    stage.train(6)
    for step in range(5):
        write_sums(stage, "batch_hash", step, {"0": step * 17}, {"0": step * 17})
    found = stage.first()
    assert (found.code, found.ranks, found.certainty) == ("MC412", [0, 1], "suspected")


@pytest.mark.parametrize(
    "batches",
    [
        [(step, step + 100) for step in range(8)],  # disjoint
        [(7, 7) for _ in range(8)],  # one batch for ever: a test of speed
        [(step, step) for step in range(2)],  # too few to tell
        [(step, step if step != 3 else 99) for step in range(8)],  # alike by chance, or for a while
    ],
)
def test_ranks_with_data_of_their_own_are_left_alone(stage: Stage, batches: list[tuple[int, int]]) -> None:
    stage.ranks(2)
    stage.train(6)
    for step, (left, right) in enumerate(batches):
        write_sums(stage, "batch_hash", step, {"0": left}, {"0": right})
    assert stage.findings() == []


def test_numbers_that_no_loader_gave_are_nobodys_data(stage: Stage) -> None:
    stage.ranks(2)
    for step in range(8):
        write_sums(stage, "batch_hash", step, {"0": step}, {"0": step})
    assert stage.findings() == []


# Tokens


def test_a_failure_on_a_token_without_a_row_is_about_the_token(stage: Stage) -> None:
    first, second = stage.ranks(2)
    stage.train(3)
    second.event("token_range", largest=128001, rows=32000, module="model.embed")
    second.fails("IndexError", "index out of range in self", line=30, function="forward")
    second.exits(1)
    first.exits(None, signal=15)
    found = stage.first(live=False)
    assert (found.code, found.ranks, found.tensor) == ("MC902", [1], "model.embed")
    assert found.facts == {"token": 128001, "rows": 32000, "module": "model.embed"}


# Early warnings


def write_losses(stage: Stage, values: list[float]) -> None:
    for actor in stage.actors:
        actor.event("losses", steps=list(range(len(values))), values=values)


def noisy(count: int, level: float = 2.0, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [level + chance.gauss(0, 0.05) for _ in range(count)]


def test_a_spike_that_stays_is_reported_with_its_step(stage: Stage) -> None:
    stage.ranks(2)
    write_losses(stage, [*noisy(80), 9.0, 8.5, 8.7, *noisy(20, level=8.0)])
    found = stage.first()
    assert (found.code, found.step, found.severity, found.ranks) == ("MC413", 80, "warning", [0, 1])


@pytest.mark.parametrize(
    "losses",
    [
        noisy(300),
        [*noisy(80), 9.0, *noisy(80)],  # one odd batch
        [*noisy(20), 9.0, 9.0, 9.0],  # too short to know what is usual
        [10 * math.exp(-step / 40) + 0.1 for step in range(200)],
        [*noisy(100, level=10.0), *noisy(100, level=2.0), *noisy(100, level=2.6)],
        [random.Random(1).lognormvariate(0, 1) for _ in range(1)]
        + [math.exp(random.Random(s).gauss(0, 1)) for s in range(400)],
    ],
)
def test_noise_is_no_spike(losses: list[float]) -> None:
    assert spike_in(list(enumerate(losses))) is None


def look(stage: Stage, step: int, norms: dict[str, float], **more: Any) -> None:
    for actor in stage.actors:
        actor.event("gradients", step=step, norms=norms, **more)


def test_a_loss_that_stays_at_that_of_guessing_lists_what_is_seen(stage: Stage) -> None:
    stage.ranks(1)
    write_losses(stage, noisy(260, level=math.log(1000)))
    look(stage, 250, {"a": 1e-9, "b": 0.0}, choices=1000, lr=[1e-9], frozen=["c"], without_gradient=["d"])
    found = stage.first()
    assert (found.code, found.certainty, found.cause) == ("MC414", "suspected", "parameters")
    assert (found.facts["choices"], found.facts["rates"]) == (1000, [1e-9])
    text = " ".join(found.evidence)
    assert all(word in text for word in ("frozen (requires_grad is False): c", "reaches d"))


def test_a_loss_that_comes_down_to_guessing_and_stays_there_has_learnt_nothing(stage: Stage) -> None:
    stage.ranks(1)
    guess = math.log(64)
    write_losses(stage, [guess * (1 + 0.015 * math.exp(-step / 30)) for step in range(300)])
    look(stage, 250, {"a": 1.0}, choices=64, lr=[1e-3])
    assert stage.first().code == "MC414"


GUESS = math.log(10)


def stuck(stage: Stage, levels: list[float], *, lr: float = 1e-3, norms: dict[str, float] | None = None) -> Any:
    """A loss that passes through these levels, by ten choices; the finding, or None."""
    stage.ranks(2)
    values = [level for level in levels for _ in range(300 // len(levels))]
    write_losses(stage, [value * (1 + 0.001 * (step % 3 - 1)) for step, value in enumerate(values)])
    look(stage, 250, norms or {"a": 0.5, "b": 0.2}, choices=10, lr=[lr], parameters=2)
    found = stage.findings()
    return found[0] if found else None


def test_a_fresh_model_that_stays_above_guessing_has_learnt_nothing(stage: Stage) -> None:
    found = stuck(stage, [1.07 * GUESS], lr=1e-8)
    assert (found.code, found.ranks, found.severity, found.step) == ("MC414", [0, 1], "warning", 299)
    assert found.title == "the loss has stayed at 2.464 for 299 steps: no better than guessing"
    assert (found.cause, found.facts["steps"], found.facts["rates"]) == ("rate_too_small", 299, [1e-8])
    assert found.facts["moved_at_most"] == pytest.approx(299e-8)
    assert found.fix[0] == "raise the learning rate"


@pytest.mark.parametrize(
    "levels",
    [
        [1.12 * GUESS],  # some other kind of loss
        [0.95 * GUESS],  # better than guessing
        [1.08 * GUESS, 1.05 * GUESS, 1.03 * GUESS],  # on its way down
        [1.03 * GUESS, 1.05 * GUESS, 1.08 * GUESS],
        [1.01 * GUESS, 1.0 * GUESS, 0.99 * GUESS],
    ],
)
def test_a_loss_that_moves_or_is_elsewhere_is_not_that_of_guessing(stage: Stage, levels: list[float]) -> None:
    assert stuck(stage, levels) is None


def test_labels_are_suspected_where_rate_and_gradients_are_well(stage: Stage) -> None:
    found = stuck(stage, [GUESS])
    assert (found.cause, found.facts["rates"]) == ("labels", [1e-3])
    assert found.fix[0].startswith("check that labels are shifted")


def test_what_gets_no_gradient_is_the_cause_whatever_the_rate(stage: Stage) -> None:
    found = stuck(stage, [GUESS], lr=1e-9, norms={"a": 0.5, "b": 0.0})
    assert found.cause == "parameters" and "observed: the gradient is 0 in b" in found.evidence
    assert found.fix[0].startswith("check requires_grad")


def test_of_many_that_get_no_gradient_the_one_where_it_stops_comes_first(stage: Stage) -> None:
    zeros = {f"{layer}.{kind}": 0.0 for layer in range(4) for kind in ("weight", "bias")}
    found = stuck(stage, [GUESS], norms={**zeros, "4.weight": 0.0, "4.bias": 0.5})
    assert "observed: the gradient is 0 in 3.weight, 0.weight, 0.bias, 1.weight" in found.evidence


def test_an_optimizer_without_a_single_gradient_trains_something_else(stage: Stage) -> None:
    stage.ranks(2)
    for step in (50, 100, 150):
        look(stage, step, {}, without_gradient=["parameter 0"], parameters=3)
    assert stage.findings() == []
    look(stage, 200, {}, without_gradient=["parameter 0"], parameters=3)
    found = stage.first()
    assert (found.code, found.ranks, found.step) == ("MC415", [0, 1], 200)
    assert (found.cause, found.facts) == ("other_parameters", {"parameters": 3})
    assert "observed: all gradients are None at steps 50, 100, 150, 200 on ranks 0 and 1" in found.evidence


def test_a_loss_that_falls_or_never_was_a_guess_is_left_alone(stage: Stage) -> None:
    stage.ranks(2)
    falling = [math.log(1000) - 0.001 * step for step in range(260)]
    stage.actors[0].event("losses", steps=list(range(260)), values=falling)
    stage.actors[1].event("losses", steps=list(range(260)), values=noisy(260, level=0.7))
    look(stage, 250, {"a": 1.0}, choices=1000, lr=[1e-3])
    assert stage.findings() == []


def test_a_layer_without_a_gradient_in_four_looks_is_named(stage: Stage) -> None:
    stage.ranks(2)
    for step in (50, 100, 150):
        look(stage, step, {"alive": 1.0, "dead.weight": 0.0})
    assert stage.findings() == []
    look(stage, 200, {"alive": 1.0, "dead.weight": 0.0})
    found = stage.first()
    assert (found.code, found.tensor, found.ranks) == ("MC415", "dead.weight", [0, 1])


def test_a_shard_that_is_zero_on_one_rank_only_is_not_dead(stage: Stage) -> None:
    first, second = stage.ranks(2)
    for step in (50, 100, 150, 200, 250):
        first.event("gradients", step=step, norms={"embed": 0.0, "head": 1.0})
        second.event("gradients", step=step, norms={"embed": 0.5, "head": 1.0})
    assert stage.findings() == []


def test_gradients_that_grow_look_after_look_are_a_warning(stage: Stage) -> None:
    stage.ranks(1)
    for number, norm in enumerate((1.0, 4.0, 20.0, 90.0, 400.0)):
        look(stage, 50 * (number + 1), {"w": norm})
    found = stage.first()
    assert (found.code, found.step) == ("MC416", 250)


def test_growth_names_all_ranks_that_have_it_and_the_largest_gradient(stage: Stage) -> None:
    grows_here, grows_too, steady = stage.ranks(3)
    for number, norm in enumerate((1.0, 4.0, 20.0, 90.0, 400.0)):
        step = 50 * (number + 1)
        for actor in (grows_here, grows_too):
            actor.event("gradients", step=step, norms={"body": 0.5, "head": norm})
        steady.event("gradients", step=step, norms={"body": 0.5, "head": 1.0})
    found = stage.first()
    assert (found.code, found.ranks, found.tensor) == ("MC416", [0, 1], "head")
    assert found.evidence == [
        "observed: gradient norm 1.12, 4.03, 20, 90, 400 at steps 50, 100, 150, 200, 250",
        "observed: the largest part of it is that of head: 400, up from 1 at step 50",
    ]


def test_outputs_that_grow_are_a_warning_once_they_are_large(stage: Stage) -> None:
    stage.ranks(2)
    for number, size in enumerate((2.0, 6.0, 18.0, 54.0, 99.0)):
        look(stage, 50 * (number + 1), {"w": 1.0}, largest_output=size)
    assert stage.findings() == []
    look(stage, 300, {"w": 1.0}, largest_output=130.0)
    found = stage.first()
    assert (found.code, found.ranks, found.step) == ("MC416", [0, 1], 300)
    assert found.evidence == [
        "observed: largest output of the model 6, 18, 54, 99, 130 at steps 100, 150, 200, 250, 300"
    ]


def test_a_norm_that_grows_in_our_own_trainer_is_that_of_all_ranks(stage: Stage) -> None:
    stage.ranks(2)
    writer = JsonlWriter(stage.run_dir.metrics)
    for step in range(260):
        writer.write({"step": step, "loss": 2.0, "grad_norm": 10.0 ** (step // 50), "lr": 1e-3})
    writer.close()
    found = stage.first()
    assert (found.code, found.ranks, found.step) == ("MC416", [0, 1], 259)


@given(st.lists(st.floats(0.1, 10), min_size=5, max_size=40))
def test_values_within_two_orders_of_magnitude_never_grow(values: list[float]) -> None:
    assert not grows(values, 100.5)


def test_the_metrics_of_our_own_trainer_give_the_same_warnings(stage: Stage) -> None:
    stage.ranks(1)
    writer = JsonlWriter(stage.run_dir.metrics)
    for step, loss in enumerate([*noisy(90), 12.0, 12.0, 12.0, 12.0]):
        writer.write({"step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3})
    writer.close()
    found = stage.first()
    assert (found.code, found.step, found.ranks) == ("MC413", 90, [0])


@pytest.mark.parametrize(("last", "codes"), [(63.0, ["MC413"]), (11.0, [])])
def test_a_loss_that_climbs_far_above_its_start_diverges_also_in_a_short_run(
    stage: Stage, last: float, codes: list[str]
) -> None:
    stage.ranks(1)
    writer = JsonlWriter(stage.run_dir.metrics)
    for step in range(30):
        writer.write({"step": step, "loss": 8 + (last - 8) * step / 29, "grad_norm": 1.0, "lr": 3e-2})
    writer.close()
    found = stage.verdict().findings
    assert [finding.code for finding in found] == codes
    assert not found or "from 8 to 63 in 30 steps" in found[0].title


def test_numbers_that_are_not_finite_say_more_than_warnings(stage: Stage) -> None:
    stage.ranks(2)
    stage.train(3)
    for step in range(5):
        write_sums(stage, "batch_hash", step, {"0": step}, {"0": step})
    write_sums(stage, "param_hash", 2, {"w": 1}, {"w": 2})
    stage.actors[1].event(
        "nonfinite", step=2, loss="nan", grad_norm="nan", action="observe", cause="MC408", direction="forward"
    )
    found = stage.findings()
    assert [(f.code, f.ranks, f.severity) for f in found] == [("MC408", [1], "warning")]


_VALUES = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3))
_RECORDS = st.dictionaries(
    st.sampled_from(
        ["step", "group", "hashes", "steps", "values", "norms", "lr", "choices", "frozen", "largest", "rows"]
    ),
    st.one_of(_VALUES, st.dictionaries(st.text(max_size=3), _VALUES, max_size=3)),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from(["param_hash", "batch_hash", "losses", "gradients", "token_range"]), _RECORDS))
)
def test_records_of_any_shape_are_read_without_a_failure(
    stage: Stage, records: list[tuple[str, dict[str, Any]]]
) -> None:
    if not stage.actors:
        stage.ranks(2)
    for event, fields in records:
        for actor in stage.actors:
            actor.event(event, **fields)
    assert set(codes(stage.findings())) <= {"MC410", "MC412", "MC413", "MC414", "MC415", "MC416"}
