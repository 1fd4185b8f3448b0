"""Why a step was not finite: the code that the evidence deserves, the sentences that say so, and their values.

What the failing operation itself shows comes first (float16, an empty divisor, one bad sample, a pole of a derivative);
what only the steps before show comes after it (a rate, a growth, an initialisation).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from model_check.blackbox.device_numbers import tensors_in
from model_check.numerics.finite import checkable, finite
from model_check.numerics.origins import Origin
from model_check.numerics.replaying import Call

if TYPE_CHECKING:
    from model_check.numerics.hits import Hit

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
    widest_gain: tuple[str, float] | None  # the parameter that enlarges what passes through it most
    bad_samples: Sequence[int] | None  # of the batch, those that are bad alone; None: not known
    batch_samples: int
    # Not known of a script, where the effect of a learning rate on a weight depends on the optimizer:
    weight_size: float | None = None  # root mean square of the weights at the start of the run
    ignored_labels: bool = False  # a whole batch or sample without a label that counts
    scale: float | None = None  # of the loss, in float16
    last_good_scale: float | None = None
    reproduced: bool = True
    largest_weight: tuple[str, float] | None = None  # parameter and magnitude, where products run in float16


@dataclass(frozen=True)
class Cause:
    """The code of the finding, its sentences, and the values in them under the keys that the catalogue lists."""

    code: str
    evidence: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def too_fast(self) -> bool:
        """Not the format is at fault: the learning rate has made the numbers this large."""
        return bool(self.facts.get("too_fast"))

    def because(self, evidence: Iterable[str], facts: Mapping[str, Any], code: str = "") -> Cause:
        """With more evidence in front of its own."""
        return Cause(code or self.code, (*evidence, *self.evidence), {**facts, **self.facts})


def judge_cause(now: Situation) -> Cause:
    """The most specific cause that the evidence supports."""
    origin = now.origin
    if not now.reproduced:
        return Cause("MC409", ("observed: the same step with the same batch, weights and random state is finite",))
    said = Cause("", _origin_sentences(origin))
    for rule in (_given, _empty_mask, _half_overflow, _bad_sample, _pole, _rate, _initialisation, _growth):
        found = rule(now)
        if found is not None:
            found = found.because(said.evidence, {})
            behind = _rate(now) if found.code == "MC403" else None
            return _made_too_large(found, behind.evidence, behind.facts) if behind is not None else found
    backward = origin is not None and origin.direction == "backward"
    return replace(said, code="MC402" if backward else "MC401")


def _made_too_large(found: Cause, evidence: Sequence[str], facts: Mapping[str, Any]) -> Cause:
    return Cause(found.code, (*found.evidence, *evidence, TOO_FAST), {**found.facts, **facts, "too_fast": True})


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
    code = "MC404" if origin.given.kind == "input" else "MC401"
    return Cause(code, (f"observed: {origin.given} is not finite before the step begins ({share} of it)",))


def _empty_mask(now: Situation) -> Cause | None:
    if now.origin is None or not now.origin.empty_divisor:
        return None
    labels = ("observed: every label of a batch is -100",) if now.ignored_labels else ()
    facts = {"problem": "labels_ignored" if labels else "zero_divisor"}
    return Cause("MC408", ("observed: the number it divides by is 0", *labels), facts)


def _half_overflow(now: Situation) -> Cause | None:
    origin = now.origin
    if origin is None or origin.dtype != "float16" or origin.magnitude == math.inf:
        return None  # what is infinite in float32 too is not the format's fault
    said: list[str] = []
    facts: dict[str, Any] = {}
    if origin.magnitude is not None and origin.magnitude > FLOAT16_MAX:
        facts["magnitude"] = origin.magnitude
        said.append(f"observed: {origin.magnitude:.6g} in float16, whose largest number is {FLOAT16_MAX:.0f}")
    elif origin.received and now.largest_weight is not None and now.largest_weight[1] > FLOAT16_MAX:
        name, size = now.largest_weight
        facts |= {"parameter": name, "magnitude": size}
        said.append(f"observed: {name} holds {size:.6g}, and the largest number of float16 is {FLOAT16_MAX:.0f}")
    elif origin.direction == "forward" or not _came_near(origin):
        return None
    if now.scale is not None:
        good = f"{now.last_good_scale:g}" if now.last_good_scale is not None else "none in this run"
        said.append(f"observed: loss scale {now.scale:g}, last good scale {good}")
    return Cause("MC403", tuple(said), facts)


def _came_near(origin: Origin) -> bool:
    """Infinity, or NaN out of large numbers; NaN out of small ones is a pole, whatever the format."""
    return origin.kind == "inf" or any(r.absmax > FLOAT16_MAX / 100 for r in origin.inputs)


def _bad_sample(now: Situation) -> Cause | None:
    if now.bad_samples is None or not 0 < len(now.bad_samples) < now.batch_samples:
        return None
    if now.origin is not None and now.origin.direction == "backward":
        return None
    alone = f"observed: {len(now.bad_samples)} of {now.batch_samples} samples are bad alone"
    return Cause("MC404", (alone,), {"bad_alone": len(now.bad_samples)})


def _pole(now: Situation) -> Cause | None:
    origin = now.origin
    if origin is None or origin.direction != "backward" or origin.received:
        return None
    if origin.kind == "inf" and any(r.absmax > 1e18 for r in origin.inputs):
        return None  # it grew out of range, which the steps before explain
    return Cause("MC402")


def _rate(now: Situation) -> Cause | None:
    # The weights of a step were made with the rates of the steps before it.
    rates = [step.lr for step in now.before]
    for slow, fast in pairwise(rates[-_RECENT:]):
        if slow > 0 and fast >= RATE_JUMP * slow:
            jumped = f"observed: the learning rate went from {slow:.3g} to {fast:.3g} in one step"
            return Cause("MC405", (jumped,), {"rates": [slow, fast]})
    largest = max(rates, default=0.0)
    if now.weight_size and largest >= RATE_SHARE * now.weight_size:
        against = f"{largest / now.weight_size:.3g} times the weights at the start ({now.weight_size:.3g})"
        facts = {"rates": [largest], "weight_size": now.weight_size}
        return Cause("MC405", (f"observed: learning rate {largest:.3g}, {against}",), facts)
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
        {"parameter": name, "gain": gain},
    )


def _growth(now: Situation) -> Cause | None:
    norms = [step.grad_norm for step in now.before if math.isfinite(step.grad_norm)][-10:]
    if len(norms) < 3 or norms[-1] < GROWTH * min(norms) or norms[-1] < max(norms[:-1]):
        return None
    grew = f"observed: gradient norm {', '.join(f'{n:.3g}' for n in norms)} in the steps before"
    return Cause("MC406", (grew,), {"grad_norms": norms})


# Of a script


_KEPT = 64
_EARLY_STEPS = 20
_FAR = 10.0


class History:
    """What led up to a step."""

    def __init__(self) -> None:
        self.before: deque[StepNumbers] = deque(maxlen=_KEPT)
        self.steps = 0

    def step(self, loss: float, gradient: float, rate: float) -> int:
        """Its number, from 1."""
        self.steps += 1
        self.before.append(StepNumbers(loss, gradient, rate))
        return self.steps

    def learn(self, number: int, gradient: float) -> None:
        """How large the gradient of an earlier step was: a device tells later."""
        place = len(self.before) - 1 - (self.steps - number)
        if place >= 0:
            self.before[place] = replace(self.before[place], grad_norm=gradient)

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.before if math.isfinite(step.loss)]

    def diverges_from_the_start(self, loss: float = math.nan) -> bool:
        """Every update since the first made the loss larger. `loss`: of the step in progress, where it is finite."""
        losses = self._and(loss)
        if not 2 <= len(losses) <= _EARLY_STEPS or self.steps > _EARLY_STEPS:
            return False
        return all(after > before for before, after in pairwise(losses)) and losses[-1] > _FAR * abs(losses[0])

    def rate_jump(self) -> tuple[float, float] | None:
        """The learning rate before and after it jumped, if the loss has been off its level ever since."""
        steps = list(self.before)
        for number in range(len(steps) - 1, 0, -1):
            slow, fast = steps[number - 1].lr, steps[number].lr
            if slow > 0 and fast >= RATE_JUMP * slow:
                usual = statistics.median(abs(step.loss) for step in steps[:number])
                since = [abs(step.loss) for step in steps[number + 1 :] if not abs(step.loss) <= _FAR * usual]
                return (slow, fast) if len(since) == len(steps) - number - 1 else None
        return None

    def shown(self, loss: float = math.nan, most: int = 5) -> str:
        """The newest; `loss` as above."""
        return ", ".join(f"{number:.4g}" for number in self._and(loss)[-most:])

    def _and(self, loss: float) -> list[float]:
        return [*self.losses, loss] if math.isfinite(loss) else self.losses


_OUTLIER = 100.0
_LOST_GAIN = 1000.0  # no model that learns has weights with such a gain; a wide embedding may reach 100


def judged(hit: Hit, origin: Origin | None, history: History, samples: list[int] | None, step_rate: float) -> Cause:
    """Applies the same rules as for our own trainer, then the rules that apply only to scripts."""
    call = hit.call
    usable = call is not None and not hit.why_not
    found = judge_cause(
        Situation(
            origin=origin,
            steps_done=history.steps,
            rate=step_rate,
            before=tuple(history.before),
            widest_gain=_widest_gain(call) if call is not None and history.steps == 0 else None,
            bad_samples=samples,
            batch_samples=batch_size(call) if call is not None and usable else 0,
        )
    )
    if found.code == "MC403" and not found.too_fast:
        # An optimizer like Adam moves each weight by about the rate: fewer updates cannot have made it so large.
        moved = step_rate * history.steps
        made = _diverged(history, step_rate) or _enlarged(hit, history, step_rate, moved, GAIN)
        return _made_too_large(found, made.evidence, made.facts) if made is not None else found
    if found.code in ("MC401", "MC406") and (jump := history.rate_jump()) is not None:
        jumped = f"observed: the learning rate went from {jump[0]:g} to {jump[1]:g}, and the loss left its level"
        return found.because((jumped, f"observed: losses {history.shown()}"), {"rates": list(jump)}, "MC405")
    # When numbers grow without bound, the derivative overflows before the loss does: that is not a pole.
    if found.code in ("MC401", "MC402"):
        loss = math.nan if hit.late else hit.loss  # the history already holds the loss of a late hit
        # If the model normalises, the loss does not show that one update has made weights enormous.
        largest = max((step.lr for step in history.before), default=0.0)
        made = _diverged(history, step_rate, loss) or _enlarged(hit, history, largest, largest, _LOST_GAIN)
        if made is not None:
            return found.because(made.evidence, made.facts, "MC405")
    return found


def _diverged(history: History, rate: float, loss: float = math.nan) -> Cause | None:
    if not history.diverges_from_the_start(loss):
        return None
    grew = f"observed: the loss grew with every update since the first: {history.shown(loss)}"
    return Cause("MC405", (grew, f"observed: learning rate {rate:g}"), {"rates": [rate]})


def _enlarged(hit: Hit, history: History, rate: float, moved: float, least_gain: float) -> Cause | None:
    """A weight that enlarges what passes through it this much, if updates that `moved` it this far can have done it."""
    widest = _widest_gain(hit.call) if hit.call is not None and history.steps else None
    if hit.call is None or widest is None or widest[1] < least_gain:
        return None
    parameter, gain = widest
    size = float(hit.call.unwrapped.get_parameter(parameter).detach().float().std())
    if not moved >= RATE_SHARE * size:
        return None
    often = f"{history.steps} update{'s' if history.steps > 1 else ''}"
    large = f"{parameter} (deviation {size:.3g}) enlarges what passes through it {gain:.3g} times"
    said = f"observed: after {often} at a learning rate of {rate:g}, {large}"
    return Cause("MC405", (said,), {"rates": [rate], "parameter": parameter, "gain": gain})


def _widest_gain(call: Call) -> tuple[str, float] | None:
    """The parameter with the largest gain, and the gain. Skips sharded parameters, which would involve all ranks."""
    gains = [
        (name, float(parameter.detach().float().std()) * math.sqrt(parameter[0].numel()))
        for name, parameter in call.unwrapped.named_parameters()
        if parameter.dim() >= 2 and parameter.shape[0] > 1 and finite(parameter)
        if not hasattr(parameter, "_local_tensor")
    ]
    return max(gains, key=lambda gain: gain[1], default=None)


def odd(call: Call, samples: list[int]) -> bool:
    """Whether these samples hold numbers that are not finite or far outside the others: the data is to blame."""
    args, kwargs = call.given()
    for tensor in tensors_in(args, kwargs):
        if not checkable(tensor) or not tensor.dim() or not 0 < len(samples) < tensor.shape[0]:
            continue
        sizes = tensor.detach().reshape(tensor.shape[0], -1).abs().amax(dim=1).tolist()
        others = sorted(size for number, size in enumerate(sizes) if number not in samples)
        usual = max(others[len(others) // 2], 1e-6)
        if all(not sizes[number] <= _OUTLIER * usual for number in samples):
            return True
    return False


def batch_size(call: Call) -> int:
    first = next(tensors_in(*call.given()), None)
    return first.shape[0] if first is not None and first.dim() else 0
