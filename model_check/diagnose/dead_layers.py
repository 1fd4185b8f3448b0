"""Which layer the gradient does not get past, out of the parameters whose gradient is exactly 0.

A dead or saturated function takes the gradient from every layer before it, so most of what is 0 is a consequence. It
also hands zeros to the layer behind it, whose weight then has nothing to learn from while its bias still does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# What is added learns from any gradient that arrives, whatever the layer is given; FSDP keeps whole layers in one.
_NEED_NO_INPUT = ("bias", "_flat_param")


@dataclass(frozen=True)
class Stop:
    """Where the gradient stops.

    name       the first parameter of the layer nearest to the loss that gets none
    before     the others without one: in that layer and in those before it
    behind     those without one behind it
    next_one   the nearest behind it that has one; empty where there is none
    starved    the layer does get a gradient, of which another parameter learns: what it is given is 0
    """

    name: str
    before: tuple[str, ...]
    behind: tuple[str, ...]
    next_one: str
    starved: bool


def where_it_stops(names: Sequence[str], dead: Collection[str]) -> Stop | None:
    """names: the parameters in the order of the model; dead: those whose gradient is 0."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(_layer_of(name), []).append(name)
    in_order = list(layers.values())
    stopped = [number for number, layer in enumerate(in_order) if all(name in dead for name in layer)]
    if stopped:
        chosen = _last_without(in_order, stopped)
    else:
        chosen = next((number for number, layer in enumerate(in_order) if any(name in dead for name in layer)), -1)
    if chosen < 0:
        return None
    name = next(name for name in in_order[chosen] if name in dead)
    later = [name for layer in in_order[chosen + 1 :] for name in layer]
    return Stop(
        name=name,
        before=tuple(n for layer in in_order[: chosen + 1] for n in layer if n in dead and n != name),
        behind=tuple(n for n in later if n in dead),
        next_one=next((n for n in later if n not in dead), ""),
        starved=not stopped,
    )


def _last_without(layers: Sequence[Sequence[str]], stopped: Sequence[int]) -> int:
    """The last layer that gets no gradient, among `stopped` whose parameters are all 0.

    The weights of a layer without a bias are 0 as well where its inputs are: of the last ones in a row the newest with
    a bias is certain, and without any the usual pair (in, function, out) has it before the last.
    """
    row = [stopped[-1]]
    while row[0] - 1 in stopped:
        row.insert(0, row[0] - 1)
    certain = [number for number in row if any(map(_needs_no_input, layers[number]))]
    return certain[-1] if certain else row[-2:][0]


def _needs_no_input(name: str) -> bool:
    leaf = name.rpartition(".")[2]
    return any(word in leaf for word in _NEED_NO_INPUT)


def _layer_of(name: str) -> str:
    """The module that holds it; a parameter of the root module stands for itself."""
    return name.rpartition(".")[0] or name
