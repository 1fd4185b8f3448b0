"""The backward passes that went into the gradients of one step, and which of them made the gradients bad.

A loss that is not finite points at its own pass. If all losses are finite, only the gradients show the fault, and they
are sums over all passes. The pass is then known if an early gradient was good before it and bad after it, if its loss
code touches a pole, or if one of its forwards gives bad gradients once more. Otherwise the report says that it was one
of several.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from model_check.blackbox.device_numbers import Reading
from model_check.numerics.hits import Hit, OwnShare, bad_once_more
from model_check.numerics.loss_code import NO_CODE, LossCode, Place
from model_check.numerics.probes import size_of
from model_check.numerics.replaying import Call

_MOST_PASSES = 1024  # a script that updates its weights by itself never ends a step
_WITH_CODE = 64  # newest passes that keep their loss code, which holds tensors in memory
_ENOUGH_LOOKS = 16


@dataclass
class Pass:
    """One `backward` of the step in progress."""

    loss: Reading
    calls: list[Call]
    place: Place | None
    code: LossCode = NO_CODE
    hit: Hit | None = None
    ended: bool = False  # whether its backward is over
    left: Sequence[Reading] = ()  # the sizes of early gradients after its backward, as far as they were read

    def hit_of_its_loss(self) -> Hit:
        """Describes a loss that is not finite, as seen before its backward or from what has been kept since."""
        return self.hit or Hit.in_forward(float(self.loss.value()), self.calls, self.code, self.place)

    def gradients_are_gone(self) -> bool:
        """Whether no module it called has gradients. Zeros are gradients: a batch without any label gives them too."""
        return bool(self.calls) and all(p.grad is None for call in self.calls for p in call.module.parameters())


class Passes:
    """The backward passes of the step in progress."""

    def __init__(self) -> None:
        self._all: deque[Pass] = deque(maxlen=_MOST_PASSES)
        self.places: deque[Place] = deque(maxlen=_MOST_PASSES)  # of all backwards that this step's gradients come from
        self.scaled: Pass | None = None  # the newest pass whose loss a GradScaler multiplies
        self._before: Pass | None = None  # the pass of the last backward, if it has one

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

        A GPU is left alone unless the guard halts: a kernel for every micro-batch would cost time in every step.
        Nothing is read while a torch dispatch mode records every operation.
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
        """The hit of a step whose losses are finite and whose gradients are not."""
        return _gradient_hit(list(self._all), list(self.places), calls, own)


class LossLines:
    """What is known of each line that computes a loss, because every step comes from the same few lines."""

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
        """Code in which nothing can fail is searched only now and then, because it makes the same graph each time."""
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
    """`places`: the lines of all backwards of the step, also of those that are not among `passes`."""
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
