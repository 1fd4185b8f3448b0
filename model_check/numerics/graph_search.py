"""Finds the operation inside a model that made the first bad number, from the numbers saved in the graph of the loss.

For a pass that cannot be run again, or comes out finite the second time: the module counts its own calls, its
parameters are sharded, or it changes its input in place. Nothing is computed and no peer is involved. The numbers are
there until the backward pass has run.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from model_check.blackbox.box import BOX
from model_check.blackbox.current_phase import SavedHooks
from model_check.numerics.finite import finite
from model_check.numerics.loss_code import (
    LossOperation,
    Operation,
    Place,
    Problem,
    lines_with,
    located,
    nodes_behind,
    number_of,
)
from model_check.numerics.origins import only_minus_infinity
from model_check.numerics.replaying import Call

_MOST_NODES = 4000
_MOST_SECONDS = 5.0
_FIRST_GIVEN = Problem("first_given")
_MADE_IN_PLACE = ("Div", "Sqrt", "Log", "Pow", "Reciprocal")


@dataclass(frozen=True)
class Sighting:
    """Where the first bad number was made."""

    call: Call | None  # the forward that made it; None: the script's own code between two modules
    made: LossOperation | None = None  # None: the operation is unknown
    given: str = ""  # the name of a parameter that was bad before the pass began

    @property
    def was_given_it(self) -> bool:
        """Whether the first known operation already received the bad number, and not from a parameter."""
        return self.made is not None and not self.made.made_it and not self.given


def first_made(root: Any, calls: Sequence[Call]) -> Sighting | None:
    """None if nothing is known, or if the loss code after all modules made it."""
    for call in calls:
        if name := _bad_parameter(call):
            return Sighting(call, given=name)
    if SavedHooks.used or root is None or not calls:
        return None
    nodes = list(itertools.islice(nodes_behind(root, ()), _MOST_NODES + 1))
    if len(nodes) > _MOST_NODES:
        return None
    stumbled, met = _stumbles(reversed(nodes))
    if met is not None:
        before = set(nodes_behind(met, ()))
        stumbled = [(node, problem) for node, problem in stumbled if node in before]
    if stumbled:
        node, problem = stumbled[-1]
        return _placed(node, problem, calls)
    maker = _maker(met, calls) if met is not None else None
    if maker is None:
        return None
    kind = Operation.unread(met).kind
    return Sighting(maker, _written_in_place(maker) or _in_forwards(maker, kind, _FIRST_GIVEN, made_it=False))


def _bad_parameter(call: Call) -> str:
    return next((name for name, p in call.unwrapped.named_parameters() if not finite(p)), "")


def _stumbles(nodes: Iterable[Any]) -> tuple[list[tuple[Any, Problem | None]], Any]:
    """Operations that may have made a bad number, in order, and the first operation that was given one."""
    found: list[tuple[Any, Problem | None]] = []
    last = time.monotonic() + _MOST_SECONDS
    for node in nodes:
        operation = Operation.of(node)
        kept = operation.kept()
        given = [t for name, t in kept.items() if "result" not in name and "grad" not in name]
        if any(map(_bad, given)):
            return found, node
        problem = operation.problem()
        if problem is not None or (given and any(map(_bad, kept.values()))):
            found.append((node, problem))
        if time.monotonic() > last:
            break
    return found, None


def _bad(tensor: torch.Tensor) -> bool:
    return not finite(tensor) and not only_minus_infinity(tensor)


def _maker(node: Any, calls: Sequence[Call]) -> Call | None:
    return next((call for call in calls if number_of(node) in call.nodes), None)


def _placed(node: Any, problem: Problem | None, calls: Sequence[Call]) -> Sighting | None:
    call, kind = _maker(node, calls), Operation.unread(node).kind
    if call is not None:
        return Sighting(call, _in_forwards(call, kind, problem))
    later = next((other for other in calls if other.nodes.start > number_of(node)), None)
    site = later.line() if later is not None else None
    if site is None:
        return None  # it is in the loss code, which is examined separately
    path = BOX.code.path_of(site.file)
    place = Place(site.file, site.line, site.function, path, last=sys.maxsize) if path is not None else None
    return Sighting(None, located(kind, place, problem=problem, made_it=True))


def _in_forwards(call: Call, kind: str, problem: Problem | None, *, made_it: bool = True) -> LossOperation:
    """The operation with its line in the forwards of the model's classes, if only one line contains it."""
    found = [(place, line) for place in _forwards(call) for line in lines_with(kind, place)]
    if len(found) != 1:
        return LossOperation(kind, made_it=made_it, problem=problem)
    place, line = found[0]
    return LossOperation(kind, place.file, line, place.function, made_it, problem)


def _written_in_place(call: Call) -> LossOperation | None:
    """For a forward that changes its input: the graph lacks that operation, but the source may contain only one."""
    if not call.changed_its_input:
        return None
    found = [(kind, place, n) for place in _forwards(call) for kind in _MADE_IN_PLACE for n in lines_with(kind, place)]
    if len({(place.file, line) for _, place, line in found}) != 1:
        return None
    kind, place, line = found[0]
    return LossOperation(kind, place.file, line, place.function)


def _forwards(call: Call) -> Iterator[Place]:
    """The forward of each user class in the model."""
    codes = {getattr(type(module).forward, "__code__", None) for module in call.unwrapped.modules()}
    for code in codes:
        shown = BOX.code.shown(code.co_filename) if code is not None else None
        if code is not None and shown is not None:
            lines = [line for _, _, line in code.co_lines() if line is not None]
            yield Place(shown, max(lines), code.co_name, code.co_filename, last=sys.maxsize)
