"""The cause behind a guard hit: our own trainer's rules first, then rules that apply only to scripts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from model_check.blackbox.device_numbers import tensors_in
from model_check.numerics.causes import GAIN, RATE_SHARE, TOO_FAST, Cause, Situation, judge_cause
from model_check.numerics.forward_inputs import Call
from model_check.numerics.origins import Origin
from model_check.numerics.ranges import checkable
from model_check.numerics.replaying import finite
from model_check.numerics.step_history import History

if TYPE_CHECKING:
    from model_check.numerics.blame import Hit

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
            weight_size=None,  # the effect of a learning rate on a weight depends on the script's optimizer
            widest_gain=_widest_gain(call) if call is not None and history.steps == 0 else None,
            bad_samples=samples,
            batch_samples=batch_size(call) if call is not None and usable else 0,
            ignored_labels=False,
            scale=None,
            last_good_scale=None,
            reproduced=True,
        )
    )
    if found.code == "MC403" and TOO_FAST not in found.evidence:
        return Cause("MC403", (*found.evidence, *_made_by_the_rate(hit, history, step_rate)))
    if found.code in ("MC401", "MC406") and (jump := history.rate_jump()) is not None:
        jumped = f"observed: the learning rate went from {jump[0]:g} to {jump[1]:g}, and the loss left its level"
        return Cause("MC405", (jumped, f"observed: losses {history.shown()}", *found.evidence))
    # When numbers grow without bound, the derivative overflows before the loss does: that is not a pole.
    if found.code in ("MC401", "MC402"):
        loss = math.nan if hit.late else hit.loss  # the history already holds the loss of a late hit
        if history.diverges_from_the_start(loss):
            grew = f"observed: the loss grew with every update since the first: {history.shown(loss)}"
            return Cause("MC405", (grew, f"observed: learning rate {step_rate:g}", *found.evidence))
        if enlarged := _enlarged_by_one_update(hit, history):
            return Cause("MC405", (enlarged, *found.evidence))
    return found


def _enlarged_by_one_update(hit: Hit, history: History) -> str:
    """If the model normalises, the loss does not show that one update has made weights enormous."""
    if hit.call is None or not history.steps:
        return ""
    widest = _widest_gain(hit.call)
    if widest is None or widest[1] < _LOST_GAIN:
        return ""
    size = _deviation(hit.call, widest[0])
    rate = max((step.lr for step in history.before), default=0.0)
    return _enlarges(history, rate, *widest, size) if rate >= RATE_SHARE * size else ""


def _made_by_the_rate(hit: Hit, history: History, rate: float) -> tuple[str, ...]:
    """Evidence that the updates, not the format, made a number too large for float16."""
    if history.diverges_from_the_start():
        grew = f"observed: the loss grew with every update since the first: {history.shown()}"
        return grew, f"observed: learning rate {rate:g}", TOO_FAST
    widest = _widest_gain(hit.call) if hit.call is not None and history.steps else None
    if hit.call is None or widest is None or widest[1] < GAIN:
        return ()
    size = _deviation(hit.call, widest[0])
    # An optimizer like Adam moves each weight by about the learning rate: fewer updates cannot have made it so large.
    if not rate * history.steps >= RATE_SHARE * size:
        return ()
    return _enlarges(history, rate, *widest, size), TOO_FAST


def _enlarges(history: History, rate: float, parameter: str, gain: float, size: float) -> str:
    often = f"{history.steps} update{'s' if history.steps > 1 else ''}"
    large = f"{parameter} (deviation {size:.3g}) enlarges what passes through it {gain:.3g} times"
    return f"observed: after {often} at a learning rate of {rate:g}, {large}"


def _deviation(call: Call, parameter: str) -> float:
    return float(call.unwrapped.get_parameter(parameter).detach().float().std())


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
