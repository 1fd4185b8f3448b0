"""The backward passes that went into the gradients of one step, and which of them made these bad.

A loss that is not finite tells on its own pass. Behind finite losses only the gradients tell, and they are sums over
all passes: the pass is known where an early gradient was bad behind it and good before, where its loss code touches a
pole, or where one of its forwards gives bad gradients once more. Else it is one of several, and that is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from model_check.blackbox.device_numbers import Reading
from model_check.numerics.blame import Hit, OwnShare, bad_once_more
from model_check.numerics.forward_inputs import Call
from model_check.numerics.loss_code import NO_CODE, LossCode
from model_check.numerics.loss_line import Place


@dataclass
class Pass:
    """One `backward` of the step in progress."""

    loss: Reading
    calls: list[Call]
    place: Place | None
    code: LossCode = NO_CODE
    hit: Hit | None = None
    ended: bool = False  # its backward has
    left: Sequence[Reading] = ()  # the sizes of early gradients when it was over, as far as they were read

    def hit_of_its_loss(self) -> Hit:
        """Of a loss that is not finite: as it was seen before its backward, or by what was held on to since."""
        return self.hit or Hit.in_forward(float(self.loss.value()), self.calls, self.code, self.place)

    def gradients_are_gone(self) -> bool:
        """Of all that it called. Gradients of 0 say nothing: a batch without a single label has them too."""
        return bool(self.calls) and all(p.grad is None for call in self.calls for p in call.module.parameters())


def gradient_hit(passes: Sequence[Pass], places: Sequence[Place], calls: Sequence[Call], own: OwnShare) -> Hit:
    """Finite losses with gradients that are not. `places`: of all backwards of the step, whatever is known of them."""
    several = len(places) > 1
    guilty = (_first_that_left_bad(passes) or _first_at_a_pole(passes)) if several else None
    if several and not own.clean:
        calls = guilty.calls if guilty is not None else calls
        again = bad_once_more(calls)
        calls = [again] if again is not None else calls
        made = [this for this in passes if any(call is again for call in this.calls)]
        guilty = guilty or (made[0] if len(made) == 1 else None)
    shown = guilty or (passes[-1] if passes else None)
    loss = float(shown.loss.value()) if shown is not None else math.nan
    place = guilty.place if guilty is not None else places[-1] if places else None
    if own.clean:
        return Hit.received_gradients(loss, place)
    of = passes if guilty is None else [guilty]
    hit = Hit.in_backward(loss, calls, [this.code for this in of], place, own)
    return replace(hit, one_of=tuple(places)) if several and guilty is None else hit


def _first_that_left_bad(passes: Iterable[Pass]) -> Pass | None:
    for this in passes:
        if not all(math.isfinite(size.value()) for size in this.left):
            return this
        if not this.left:
            return None  # it may have been this one
    return None


def _first_at_a_pole(passes: Iterable[Pass]) -> Pass | None:
    return next((this for this in passes if this.code.at_a_pole() is not None), None)
