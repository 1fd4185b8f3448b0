"""Early warnings, before anything breaks: MC413 spike, MC414 nothing learnt, MC415 dead layer, MC416 growth.

Made from the losses and gradients that a script's ranks write down, and from the metrics of our own trainer. All of
them wait for a history and ask for far more than noise: a healthy run must never see one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from model_check.diagnose.catalogue import CATALOGUE
from model_check.diagnose.collectives import ranks_text
from model_check.diagnose.dead_layers import Stop, where_it_stops
from model_check.diagnose.evidence import Evidence, RankEvidence
from model_check.diagnose.findings import make_finding
from model_check.record import Finding
from model_check.record.events.numerics import Gradients, Losses
from model_check.record.metrics import StepMetrics

SPIKE_WINDOW = 50
SPIKE_SCORE = 10.0
SPIKE_STEPS = 3
SPIKE_FACTOR = 1.5
DIVERGED_STEPS = 15
DIVERGED_FACTOR = 2.0
_DIVERGED_LAST = 5
# Losses that hardly move at all still move in their last digits.
_LEAST_DEVIATION = 0.02
STUCK_STEPS = 200
STUCK_SHARE = 0.02
# A fresh model may begin above that of guessing: it is sure of itself without a reason. Flat there, it learns nothing.
STUCK_ABOVE = 0.1
_LEARNT_SHARE = 0.005
# By how much a weight must be able to change in all these steps before a rate can be called large enough.
_LEAST_MOVE = 1e-3
DEAD_LOOKS = 4
GROWING_LOOKS = 5
GROWTH = 100.0
LARGE_OUTPUT = 100.0
_OUTPUT_GROWTH = 10.0
_METRICS_PER_LOOK = 50
_RATES_SHOWN = 4


def training_warnings(evidence: Evidence) -> list[Finding]:
    losses = {rank.rank: _losses(rank) for rank in evidence.ranks.values()}
    losses = {rank: series for rank, series in losses.items() if series}
    own = [(metrics.step, metrics.loss) for metrics in evidence.metrics if math.isfinite(metrics.loss)]
    if own and not losses:
        losses = dict.fromkeys(evidence.ranks, own)
    looks = {rank.rank: _looks(rank) for rank in evidence.ranks.values()}
    looks = {rank: seen for rank, seen in looks.items() if seen}
    found = [
        _spike(evidence, losses) or _diverged(evidence, own),
        _stuck(evidence, losses, looks),
        _dead(evidence, looks),
        _growing(evidence, looks) or _growing_metrics(evidence),
    ]
    return [finding for finding in found if finding is not None]


# Reading


def _losses(rank: RankEvidence) -> list[tuple[int, float]]:
    told = [item for event in rank.happened(Losses) for item in zip(event.steps, event.values, strict=False)]
    return [(step, loss) for step, loss in told if math.isfinite(loss)]


def _looks(rank: RankEvidence) -> list[Gradients]:
    """With finite numbers only."""
    return [
        replace(
            look,
            norms={name: norm for name, norm in look.norms.items() if math.isfinite(norm)},
            largest_output=_finite(look.largest_output),
        )
        for look in rank.happened(Gradients)
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _total(look: Gradients) -> float:
    return math.hypot(*look.norms.values())


# Spikes


def spike_in(series: Sequence[tuple[int, float]]) -> tuple[int, float, float, float] | None:
    """The first spike: its step, loss, the usual loss before it, and by how many deviations it is away."""
    if len(series) < SPIKE_WINDOW + SPIKE_STEPS:
        return None
    values = [loss for _, loss in series]
    level = statistics.median(values)
    for first in range(SPIKE_WINDOW, len(values) - SPIKE_STEPS + 1):
        after = values[first : first + SPIKE_STEPS]
        # A sorting of the window only where the loss is high for the run as a whole.
        if min(after) <= level:
            continue
        window = values[first - SPIKE_WINDOW : first]
        usual = statistics.median(window)
        deviation = 1.4826 * statistics.median(abs(value - usual) for value in window)
        deviation = max(deviation, _LEAST_DEVIATION * abs(usual), 1e-9)
        score = (min(after) - usual) / deviation
        if score > SPIKE_SCORE and min(after) > SPIKE_FACTOR * abs(usual):
            return series[first][0], after[0], usual, score
    return None


def _spike(evidence: Evidence, losses: Mapping[int, Sequence[tuple[int, float]]]) -> Finding | None:
    spikes = {rank: found for rank, series in losses.items() if (found := spike_in(series)) is not None}
    if not spikes:
        return None
    rank = min(spikes, key=lambda number: spikes[number][0])
    step, loss, usual, score = spikes[rank]
    return make_finding(
        "MC413",
        f"the loss spiked to {loss:.4g} at step {step}, from {usual:.4g}",
        ranks=spikes,
        evidence=[
            f"observed: {score:.0f} deviations above the {SPIKE_WINDOW} steps before it, {SPIKE_STEPS} steps in a row"
        ],
        severity="warning",
        step=step,
        now=evidence.now,
        cause="spike",
        facts={"from": usual, "to": loss, "steps": SPIKE_STEPS},
    )


def _diverged(evidence: Evidence, series: Sequence[tuple[int, float]]) -> Finding | None:
    """Our trainer's loss is a cross-entropy: if it ends far above its start and above guessing, nothing is learnt."""
    if len(series) < DIVERGED_STEPS:
        return None
    first = series[0][1]  # a learning rate that is far too high already shows in the second step
    guess = math.log(evidence.vocabulary) if evidence.vocabulary else 0.0
    if min(loss for _, loss in series[-_DIVERGED_LAST:]) <= DIVERGED_FACTOR * max(first, guess):
        return None
    step, loss = series[-1]
    rates = _rates(evidence.metrics)
    lines = [f"observed: loss {first:.4g} at step {series[0][0]}, {loss:.4g} at step {step}"]
    lines += [f"observed: a model that guesses has ln({evidence.vocabulary}) = {guess:.4g}"] if guess else []
    lines += [f"observed: learning rate {max(rates):g} at its highest"] if rates else []
    return make_finding(
        "MC413",
        f"the loss grew from {first:.4g} to {loss:.4g} in {step - series[0][0] + 1} steps: training diverges",
        ranks=evidence.ranks,
        evidence=lines,
        severity="warning",
        step=step,
        fix=["lower training.learning_rate, or warm it up: training.scheduler.warmup_steps"],
        now=evidence.now,
        cause="divergence",
        facts={"from": first, "to": loss, "steps": step - series[0][0] + 1},
    )


# Nothing learnt


def _stuck(
    evidence: Evidence, losses: Mapping[int, Sequence[tuple[int, float]]], looks: Mapping[int, Sequence[Gradients]]
) -> Finding | None:
    for rank, series in sorted(losses.items()):
        seen = looks.get(rank, ())
        choices = next((look.choices for look in reversed(seen) if look.choices), evidence.vocabulary)
        passed = series[-1][0] - series[0][0]
        if choices is None or choices < 2 or passed < STUCK_STEPS or len(series) < STUCK_STEPS // 2:
            continue
        levels = _levels(series)
        guess = math.log(choices)
        if _learns_nothing(levels, guess):
            why = _why_stuck(seen, passed, evidence)
            return make_finding(
                "MC414",
                f"the loss has stayed at {levels[-1]:.4g} for {passed} steps: no better than guessing",
                ranks=losses,
                evidence=[
                    f"observed: loss {levels[0]:.4g} at first, {levels[-1]:.4g} now; ln({choices}) is {guess:.4g}",
                    *why.evidence,
                ],
                certainty="suspected",
                severity="warning",
                step=series[-1][0],
                fix=why.fix,
                now=evidence.now,
                cause=why.cause,
                facts={"loss": levels[-1], "choices": choices, "steps": passed, **why.facts},
            )
    return None


def _levels(series: Sequence[tuple[int, float]]) -> list[float]:
    """Where the loss was at first, halfway, and now."""
    middle = len(series) // 2
    parts = [series[:20], series[middle - 25 : middle + 25], series[-50:]]
    return [statistics.median(loss for _, loss in part) for part in parts]


def _learns_nothing(levels: Sequence[float], guess: float) -> bool:
    near = all(abs(level - guess) <= STUCK_SHARE * guess for level in levels)
    # From a bad start down to guessing is no learning either.
    if near and levels[-1] > min(levels[0], guess) - _LEARNT_SHARE * guess:
        return True
    flat = max(levels) - min(levels) <= _LEARNT_SHARE * guess
    return flat and guess <= min(levels) and max(levels) <= (1 + STUCK_ABOVE) * guess


@dataclass(frozen=True)
class _Why:
    """Why nothing is learnt, as far as it can be seen, and the remedies with the one that fits first."""

    cause: str
    evidence: list[str]
    fix: list[str]
    facts: dict[str, Any]


def _why_stuck(seen: Sequence[Gradients], passed: int, evidence: Evidence) -> _Why:
    higher_rate, gradients, labels = CATALOGUE["MC414"].fix
    rates = list(seen[-1].lr) if seen else _rates(evidence.metrics[-1:])
    lines = [f"observed: learning rate {', '.join(f'{rate:g}' for rate in rates[:_RATES_SHOWN])}"] if rates else []
    facts: dict[str, Any] = {"rates": rates[:_RATES_SHOWN]} if rates else {}
    held_back = _held_back(seen[-1]) if seen else []
    if held_back:
        return _Why("parameters", [*lines, *held_back], [gradients, higher_rate, labels], facts)
    highest = max([rate for look in seen for rate in look.lr] or _rates(evidence.metrics), default=None)
    if highest is None:
        return _Why("unknown", lines, [], facts)
    # Adam moves a weight by its rate at most, plain descent by the rate times the gradient.
    move = highest * passed * max([1.0, *map(_total, seen)])
    if move < _LEAST_MOVE:
        too_small = (
            f"inferred: the rate is too small: it can have moved a weight by {move:.1g} at most in {passed} steps"
        )
        facts["moved_at_most"] = move
        return _Why("rate_too_small", [*lines, too_small], [higher_rate, gradients, labels], facts)
    if not seen:
        return _Why("unknown", lines, [], facts)
    alive = f"observed: gradients reach the parameters (norm {_total(seen[-1]):.3g} at step {seen[-1].step})"
    told = "inferred: the labels do not belong to their inputs, or the inputs say nothing about them"
    return _Why("labels", [*lines, alive, told], [labels, higher_rate, gradients], facts)


def _rates(steps: Iterable[StepMetrics]) -> list[float]:
    return [metrics.lr for metrics in steps if math.isfinite(metrics.lr)]


def _held_back(look: Gradients) -> list[str]:
    """Parameters that cannot learn."""
    lines = []
    if look.frozen:
        lines.append(f"observed: frozen (requires_grad is False): {', '.join(look.frozen)}")
    if look.without_gradient:
        lines.append(f"observed: no gradient reaches {', '.join(look.without_gradient)}")
    stop = where_it_stops(list(look.norms), {name for name, norm in look.norms.items() if norm == 0})
    if stop is not None:
        lines.append(f"observed: the gradient is 0 in {', '.join([stop.name, *stop.before, *stop.behind][:4])}")
    return lines


# Dead layers


def _dead(evidence: Evidence, looks: Mapping[int, Sequence[Gradients]]) -> Finding | None:
    """A shard may be 0 rightly (rows of an embedding that no token asked for): it must be 0 on all ranks."""
    newest = {rank: seen[-DEAD_LOOKS:] for rank, seen in looks.items() if len(seen) >= DEAD_LOOKS}
    if not newest or len(newest) < len(looks):
        return None
    first = newest[min(newest)]
    if all(not look.norms and look.without_gradient for seen in newest.values() for look in seen):
        return _nothing_trained(evidence, newest, first)
    dead = set.intersection(*(_always_zero(seen) for seen in newest.values()))
    alive = [name for name, norm in first[-1].norms.items() if norm > 0]
    if not dead or not alive:
        return None
    stop = where_it_stops(list(first[-1].norms), dead)
    if stop is None:
        return None
    return make_finding(
        "MC415",
        f"{stop.name} gets no gradient" + (f", and {len(dead) - 1} more like it" if len(dead) > 1 else ""),
        ranks=newest,
        evidence=[
            f"observed: its gradient is exactly 0 at steps {', '.join(str(look.step) for look in first)} on "
            f"{ranks_text(sorted(newest))}",
            *_around(stop, alive),
        ],
        severity="warning",
        step=first[-1].step,
        tensor=stop.name,
        now=evidence.now,
        cause="starved" if stop.starved else "stopped",
        facts={"without_gradient": [stop.name, *stop.before, *stop.behind], "next": stop.next_one or alive[0]},
    )


def _around(stop: Stop, alive: Sequence[str]) -> list[str]:
    """What the gradients of the other parameters say about the place."""
    lines = []
    if stop.before:
        # Those nearest to it: what lies further away follows.
        lines.append(f"observed: so is that of {', '.join(stop.before[-5:])}, in this layer or before it")
    if stop.behind:
        lines.append(f"observed: so is that of {', '.join(stop.behind[:5])} behind it")
    if stop.starved:
        lines.append("inferred: the layer is given nothing but 0: others of its parameters do get a gradient")
    elif stop.next_one:
        lines.append(f"inferred: the gradient stops between this layer and {stop.next_one}, the next that has one")
    else:
        lines.append(f"observed: {alive[0]} learns")
    return lines


def _nothing_trained(
    evidence: Evidence, looks: Mapping[int, Sequence[Gradients]], first: Sequence[Gradients]
) -> Finding:
    return make_finding(
        "MC415",
        f"none of the optimizer's {first[-1].parameters} parameters gets a gradient",
        ranks=looks,
        evidence=[
            f"observed: all gradients are None at steps {', '.join(str(look.step) for look in first)} on "
            f"{ranks_text(sorted(looks))}",
            "inferred: the optimizer holds other parameters than the loss depends on: a copy of the model, or one that "
            "was made anew after it",
        ],
        severity="warning",
        step=first[-1].step,
        fix=["make the optimizer from the parameters of the model that is called, after it has been moved or wrapped"],
        now=evidence.now,
        cause="other_parameters",
        facts={"parameters": first[-1].parameters},
    )


def _always_zero(seen: Iterable[Gradients]) -> set[str]:
    return set.intersection(*({name for name, norm in look.norms.items() if norm == 0} for look in seen))


# Growth


def grows(values: Sequence[float], factor: float) -> bool:
    """The newest values are each larger than the one before, and by `factor` in all."""
    newest = list(values)[-GROWING_LOOKS:]
    if len(newest) < GROWING_LOOKS or newest[0] <= 0:
        return False
    return all(after > before for before, after in pairwise(newest)) and newest[-1] >= factor * newest[0]


def _growing(evidence: Evidence, looks: Mapping[int, Sequence[Gradients]]) -> Finding | None:
    totals = {rank: [(look.step, _total(look)) for look in seen] for rank, seen in looks.items()}
    growing = [rank for rank, series in totals.items() if grows([norm for _, norm in series], GROWTH)]
    if growing:
        first = min(growing)
        largest = _largest_part(looks[first])
        return _growth_finding(evidence, growing, "gradients", "gradient norm", totals[first], largest)
    outputs = {
        rank: [(look.step, look.largest_output) for look in seen if look.largest_output is not None]
        for rank, seen in looks.items()
    }
    growing = [
        rank
        for rank, series in outputs.items()
        if grows([size for _, size in series], _OUTPUT_GROWTH) and series[-1][1] > LARGE_OUTPUT
    ]
    if growing:
        return _growth_finding(evidence, growing, "outputs", "largest output of the model", outputs[min(growing)])
    return None


def _largest_part(seen: Sequence[Gradients]) -> tuple[str, str] | None:
    """The parameter that makes up most of the newest norm, and what to say of it."""
    before, newest = seen[-GROWING_LOOKS], seen[-1]
    name = max(newest.norms, key=lambda each: newest.norms[each], default=None)
    if name is None:
        return None
    earlier = f", up from {before.norms[name]:.3g} at step {before.step}" if name in before.norms else ""
    return name, f"observed: the largest part of it is that of {name}: {newest.norms[name]:.3g}{earlier}"


def _growing_metrics(evidence: Evidence) -> Finding | None:
    """Our own trainer writes the norm of every step: medians of many take the place of looks."""
    norms = [(metrics.step, metrics.grad_norm) for metrics in evidence.metrics if math.isfinite(metrics.grad_norm)]
    starts = range(len(norms) % _METRICS_PER_LOOK, len(norms), _METRICS_PER_LOOK)
    parts = [norms[start : start + _METRICS_PER_LOOK] for start in starts]
    medians = [(part[-1][0], statistics.median(norm for _, norm in part)) for part in parts]
    if not grows([norm for _, norm in medians], GROWTH):
        return None
    what = f"gradient norm (median of {_METRICS_PER_LOOK} steps)"
    return _growth_finding(evidence, evidence.ranks, "gradients", what, medians)


def _growth_finding(
    evidence: Evidence,
    ranks: Iterable[int],
    cause: str,
    what: str,
    series: Sequence[tuple[int, float]],
    largest: tuple[str, str] | None = None,
) -> Finding:
    newest = series[-GROWING_LOOKS:]
    step, value = newest[-1]
    shown = ", ".join(f"{value:.3g}" for _, value in newest)
    steps = ", ".join(str(step) for step, _ in newest)
    return make_finding(
        "MC416",
        f"the {what} keeps growing: {value:.3g} at step {step}",
        ranks=ranks,
        evidence=[f"observed: {what} {shown} at steps {steps}", *([largest[1]] if largest is not None else [])],
        severity="warning",
        step=step,
        tensor=largest[0] if largest is not None else None,
        now=evidence.now,
        cause=cause,
        facts={"sizes": [size for _, size in newest], "steps": [step for step, _ in newest]},
    )
