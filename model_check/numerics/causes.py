"""Why a step was not finite: the code that the evidence deserves, and the sentences that say so.

What the failing operation itself shows comes first (float16, an empty divisor, one bad sample, a pole of a derivative);
what only the steps before show comes after it (a rate, a growth, an initialisation).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from model_check.numerics.origins import Origin

FLOAT16_MAX = 65504.0
RATE_JUMP = 10.0
_RECENT = 6  # steps in which a jump counts as the reason
# AdamW moves each weight by about the rate: beyond this share of the weights' own size nothing learnt survives a step.
RATE_SHARE = 0.5
GROWTH = 100.0
# Weights of w inputs with deviation s multiply the size of what passes by s * sqrt(w).
GAIN = 10.0
EARLY_STEPS = 3
TOO_FAST = "inferred: the learning rate has made the numbers this large; a wider format only takes them further"


@dataclass(frozen=True)
class StepNumbers:
    """One step before the bad one."""

    loss: float
    grad_norm: float
    lr: float


@dataclass(frozen=True)
class Situation:
    """Everything that is known about a bad step when its cause is judged."""

    origin: Origin | None
    steps_done: int  # by this run, before the bad one
    rate: float
    before: Sequence[StepNumbers]
    weight_size: float | None  # root mean square of the weights at the start of the run
    widest_gain: tuple[str, float] | None  # the parameter that enlarges what passes through it most
    bad_samples: Sequence[int] | None  # of the batch, those that are bad alone; None: not known
    batch_samples: int
    ignored_labels: bool  # a whole batch or sample without a label that counts
    scale: float | None  # of the loss, in float16
    last_good_scale: float | None
    reproduced: bool
    largest_weight: tuple[str, float] | None = None  # parameter and magnitude, where products run in float16


@dataclass(frozen=True)
class Cause:
    code: str
    evidence: tuple[str, ...]


def judge_cause(now: Situation) -> Cause:
    """The most specific cause that the evidence supports."""
    origin = now.origin
    if not now.reproduced:
        return Cause("MC409", ("observed: the same step with the same batch, weights and random state is finite",))
    said = _origin_sentences(origin)
    for rule in (_given, _empty_mask, _half_overflow, _bad_sample, _pole, _rate, _initialisation, _growth):
        found = rule(now)
        if found is not None:
            behind = _rate(now) if found.code == "MC403" else None
            too_fast = (*behind.evidence, TOO_FAST) if behind is not None else ()
            return Cause(found.code, (*said, *found.evidence, *too_fast))
    backward = origin is not None and origin.direction == "backward"
    return Cause("MC402" if backward else "MC401", said)


def _origin_sentences(origin: Origin | None) -> tuple[str, ...]:
    if origin is None or origin.given is not None:
        return ()
    site = origin.site
    where = f" in {site.module}" if site.module else ""
    line = f" at {site.location}" if site.location else ""
    what = "NaN" if origin.kind == "nan" else "infinity"
    if origin.received:
        return (f"observed: {site.op}{where}{line} was the first to meet {what}",)
    if origin.direction == "backward":
        return (f"observed: the loss is finite; the derivative of {site.op}{where}{line} is {what}",)
    inputs = ", ".join(f"max {r.absmax:.3g}" for r in origin.inputs)
    return (f"observed: {site.op}{where}{line} made {what} ({origin.dtype}) of finite numbers ({inputs or 'none'})",)


def _given(now: Situation) -> Cause | None:
    origin = now.origin
    if origin is None or origin.given is None:
        return None
    share = f"{1 - origin.inputs[0].finite:.2%}" if origin.inputs else "some"
    code = "MC404" if origin.given.startswith("input") else "MC401"
    return Cause(code, (f"observed: {origin.given} is not finite before the step begins ({share} of it)",))


def _empty_mask(now: Situation) -> Cause | None:
    if now.origin is None or not now.origin.empty_divisor:
        return None
    labels = ("observed: every label of a batch is -100",) if now.ignored_labels else ()
    return Cause("MC408", ("observed: the number it divides by is 0", *labels))


def _half_overflow(now: Situation) -> Cause | None:
    origin = now.origin
    if origin is None or origin.dtype != "float16" or origin.magnitude == math.inf:
        return None  # what is infinite in float32 too is not the format's fault
    facts = []
    if origin.magnitude is not None and origin.magnitude > FLOAT16_MAX:
        facts.append(f"observed: {origin.magnitude:.6g} in float16, whose largest number is {FLOAT16_MAX:.0f}")
    elif origin.received and now.largest_weight is not None and now.largest_weight[1] > FLOAT16_MAX:
        name, size = now.largest_weight
        facts.append(f"observed: {name} holds {size:.6g}, and the largest number of float16 is {FLOAT16_MAX:.0f}")
    elif origin.direction == "forward" or not _came_near(origin):
        return None
    if now.scale is not None:
        good = f"{now.last_good_scale:g}" if now.last_good_scale is not None else "none in this run"
        facts.append(f"observed: loss scale {now.scale:g}, last good scale {good}")
    return Cause("MC403", tuple(facts))


def _came_near(origin: Origin) -> bool:
    """Infinity, or NaN out of large numbers; NaN out of small ones is a pole, whatever the format."""
    return origin.kind == "inf" or any(r.absmax > FLOAT16_MAX / 100 for r in origin.inputs)


def _bad_sample(now: Situation) -> Cause | None:
    if now.bad_samples is None or not 0 < len(now.bad_samples) < now.batch_samples:
        return None
    if now.origin is not None and now.origin.direction == "backward":
        return None
    return Cause("MC404", (f"observed: {len(now.bad_samples)} of {now.batch_samples} samples are bad alone",))


def _pole(now: Situation) -> Cause | None:
    origin = now.origin
    if origin is None or origin.direction != "backward" or origin.received:
        return None
    if origin.kind == "inf" and any(r.absmax > 1e18 for r in origin.inputs):
        return None  # it grew out of range, which the steps before explain
    return Cause("MC402", ())


def _rate(now: Situation) -> Cause | None:
    # The weights of a step were made with the rates of the steps before it.
    rates = [step.lr for step in now.before]
    for slow, fast in pairwise(rates[-_RECENT:]):
        if slow > 0 and fast >= RATE_JUMP * slow:
            return Cause("MC405", (f"observed: the learning rate went from {slow:.3g} to {fast:.3g} in one step",))
    largest = max(rates, default=0.0)
    if now.weight_size and largest >= RATE_SHARE * now.weight_size:
        against = f"{largest / now.weight_size:.3g} times the weights at the start ({now.weight_size:.3g})"
        return Cause("MC405", (f"observed: learning rate {largest:.3g}, {against}",))
    return None


def _initialisation(now: Situation) -> Cause | None:
    if now.steps_done >= EARLY_STEPS or now.widest_gain is None or now.widest_gain[1] < GAIN:
        return None
    name, gain = now.widest_gain
    return Cause(
        "MC407",
        (
            f"observed: step {now.steps_done} of this run, and {name} enlarges what passes through it {gain:.3g} times",
            "inferred: the weights were too large from the start",
        ),
    )


def _growth(now: Situation) -> Cause | None:
    norms = [step.grad_norm for step in now.before if math.isfinite(step.grad_norm)][-10:]
    if len(norms) < 3 or norms[-1] < GROWTH * min(norms) or norms[-1] < max(norms[:-1]):
        return None
    return Cause("MC406", (f"observed: gradient norm {', '.join(f'{n:.3g}' for n in norms)} in the steps before",))
