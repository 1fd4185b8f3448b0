"""The backward passes that went into the gradients of one step, and which of them made these bad.

A loss that is not finite tells on its own pass. Behind finite losses only the gradients tell, and they are sums over
all passes: the pass is known where an early gradient was bad behind it and good before, where its loss code touches a
pole, or where one of its forwards gives bad gradients once more. Else it is one of several, and that is said.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from model_check.blackbox.device_numbers import Reading
from model_check.numerics.blame import Hit, OwnShare, bad_once_more
from model_check.numerics.forward_inputs import Call
from model_check.numerics.loss_code import NO_CODE, LossCode
from model_check.numerics.loss_line import Place
from model_check.numerics.probes import size_of

_MOST = 1024  # a script that updates its weights by itself never ends a step
_WITH_CODE = 64  # the newest: it keeps numbers alive
_ENOUGH_LOOKS = 16


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


class Passes:
    """Those of the step in progress."""

    def __init__(self) -> None:
        self._all: deque[Pass] = deque(maxlen=_MOST)
        self.places: deque[Place] = deque(maxlen=_MOST)  # of all backwards that this step's gradients come from
        self.scaled: Pass | None = None  # the newest whose loss a GradScaler multiplies
        self._before: Pass | None = None  # the last backward, where that is one of the passes

    def __iter__(self) -> Iterator[Pass]:
        return iter(self._all)

    @property
    def last(self) -> Pass | None:
        return self._all[-1] if self._all else None

    @property
    def bad(self) -> Pass | None:
        """The first whose loss is not finite."""
        return next((this for this in self._all if not math.isfinite(this.loss.value())), None)

    @property
    def loss(self) -> float:
        return float(self._all[-1].loss.value()) if self._all else math.nan

    def add(self, this: Pass) -> None:
        self._before = this
        self._all.append(this)
        if len(self._all) > _WITH_CODE:
            self._all[-1 - _WITH_CODE].code = NO_CODE

    def codes(self) -> list[LossCode]:
        return [this.code for this in self._all if this.code.can_fail]

    def over(self, early: Sequence[Sequence[Any]], *, halt: bool) -> None:
        """Looks at an early gradient of each optimizer, so that a step of several passes can tell which one spoilt it.

        Not on a GPU, but to halt: a kernel for every micro-batch would be paid for in every step. Nor while somebody
        records every operation of torch's.
        """
        this, self._before = self._before, None
        if this is None or torch._C._len_torch_dispatch_stack():
            return
        first = [next((p for p in parameters if p.grad is not None), None) for parameters in early]
        read = [p for p in first if p is not None and (p.grad.is_cpu or halt)]
        this.left = [size for parameter in read if (size := size_of(parameter)) is not None]

    def forget(self) -> None:
        self._all.clear()
        self.places.clear()
        self.scaled = None
        self._before = None

    def gradient_hit(self, calls: Sequence[Call], own: OwnShare) -> Hit:
        """Finite losses with gradients that are not."""
        return _gradient_hit(list(self._all), list(self.places), calls, own)


class LossLines:
    """What is asked of each line that computes a loss: a step comes from the same ones again and again."""

    def __init__(self) -> None:
        self._places: dict[tuple[Place, tuple[int, int, int]], Place] = {}
        self._harmless: dict[Place | None, int] = {}

    def place(self, backward: Place | None, calls: Sequence[Call]) -> Place | None:
        called = next((call for call in reversed(calls) if call.learns), None)
        if backward is None or called is None:
            return backward
        key = backward, called.site
        if key not in self._places:
            self._places[key] = backward.or_of_forward(called.line())
        return self._places[key]

    def code_to_hold(self, root: Any, calls: Sequence[Call], place: Place | None, *, finite: bool) -> LossCode:
        """Code in which nothing can fail is asked only now and then: it makes the same graph again."""
        harmless = self._harmless.get(place, 0)
        if harmless >= _ENOUGH_LOOKS and harmless % _ENOUGH_LOOKS:
            self._harmless[place] = harmless + 1
            return NO_CODE
        code = LossCode.held(root.grad_fn, nodes_of(calls), place, finite=finite)
        self._harmless[place] = 0 if code.can_fail else harmless + 1
        return code


def nodes_of(calls: Sequence[Call]) -> list[range]:
    return [call.nodes for call in calls if call.learns]


def _gradient_hit(passes: Sequence[Pass], places: Sequence[Place], calls: Sequence[Call], own: OwnShare) -> Hit:
    """`places`: of all backwards of the step, whatever is known of them."""
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
