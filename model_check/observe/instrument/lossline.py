"""Names the operation, and where it can be told the line, of a loss that the script computes outside any module.

Such code cannot be run once more. What is left of it is the graph behind the loss: the operations, in order, and as
long as no backward has run the numbers they kept. The line is the one between the forward call and `backward()` in the
script's own function whose text holds that operation, if there is exactly one.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from model_check.observe.instrument.box import BOX
from model_check.observe.instrument.replaying import finite as is_finite

_MOST_NODES = 200
_MOST_HELD = 64  # of a list or a dict of losses
# Operations whose derivative has a pole, and those that make infinity or NaN of finite numbers, as autograd names them.
_POLES = frozenset(
    {"Sqrt", "Rsqrt", "Pow", "Log", "Log2", "Log10", "Log1P", "Div", "Reciprocal", "Std", "Var", "Acos", "Asin"}
    | {"Atan2", "Cdist", "Xlogy", "Exp", "Logsumexp", "NllLoss"}
)
_SLOPES = {
    "Sqrt": ("_saved_result", 0.0),
    "Pow": ("_saved_self", 0.0),
    "Log": ("_saved_self", 1e-38),
}
_MADE_OF = {
    "Sqrt": "takes the root of a negative number",
    "Rsqrt": "divides by 0",
    "Reciprocal": "divides by 0",
    "Exp": "takes the exponential of a number that is too large",
}
_LOSS_NODES = 8  # looked at in every step
_SMALL = 1 << 16
_MEAN = 1  # as torch numbers the ways to reduce a loss
_TEXT = {
    "Norm": ("norm",),
    "LinalgVectorNorm": ("norm",),
    "Pow": ("pow", "square", "rsqrt"),
    "NllLoss": ("cross_entropy", "nll_loss", "criterion", "loss_fn", "CrossEntropyLoss"),
    "Logsumexp": ("logsumexp",),
    "Mean": ("mean",),
}


@dataclass(frozen=True)
class LossOperation:
    """One operation of the loss code, and the line it stands in, 0 where that cannot be told."""

    op: str
    file: str = ""
    line: int = 0
    function: str = ""
    made_it: bool = False  # its inputs were finite and its result was not: seen, not guessed
    note: str = ""
    samples: tuple[int, ...] = ()  # of the targets it was given, those that are not finite

    @property
    def empty(self) -> bool:
        """It divides by a count that is 0."""
        return any(words in self.note for words in ("a sum that is 0", "ignored", "of nothing"))


@dataclass(frozen=True)
class Place:
    """Where the script calls backward: its own frame, read while it stands there."""

    file: str
    line: int
    function: str
    path: str

    @classmethod
    def of(cls, frame: FrameType | None) -> Place | None:
        while frame is not None:
            if (found := cls.at(frame, frame.f_lineno)) is not None:
                return found
            frame = frame.f_back
        return None

    @classmethod
    def at(cls, frame: FrameType, line: int) -> Place | None:
        """This very frame; None where it is not the script's own."""
        path = frame.f_code.co_filename
        shown = BOX.code.shown(path)
        return cls(shown, line, frame.f_code.co_name, path) if shown is not None else None


def bad_loss(frames: Sequence[tuple[FrameType, int]], since: int) -> tuple[torch.Tensor, Place | None] | None:
    """Of a script that ends before it calls `backward`: a loss that is not finite, among what its functions hold.

    The newest of several is the one that the others were added up to. `since`: the graph's first node that counts. Of a
    script that fails to get its next batch it is the loss of the last one, from which it has gone on.
    """
    if any("torch/utils/data/" in frame.f_code.co_filename for frame, _ in frames):
        return None
    found: list[tuple[int, torch.Tensor, Place | None]] = []
    place: Place | None = None
    for frame, line in frames:  # the outermost first: of a function that is handed the loss, its caller has made it
        place = Place.at(frame, line) or place
        known = {id(tensor) for _, tensor, _ in found}
        for value in list(frame.f_locals.values()):
            held = dict.values(value) if isinstance(value, dict) else value if type(value) in (list, tuple) else [value]
            for tensor in itertools.islice(held, _MOST_HELD):
                if type(tensor) is torch.Tensor and id(tensor) not in known and _may_be_loss(tensor, since):
                    found.append((_number(tensor.grad_fn), tensor, place))
    bad = [(number, tensor, place) for number, tensor, place in found if not is_finite(tensor)]
    return max(bad, key=lambda item: item[0])[1:] if bad else None


def _may_be_loss(tensor: torch.Tensor, since: int) -> bool:
    node = tensor.grad_fn
    return node is not None and tensor.numel() == 1 and tensor.is_floating_point() and _number(node) >= since


def nodes_behind(root: Any, inside: Sequence[range]) -> Iterator[Any]:
    """The graph's nodes from the loss inwards, without those that a module's forward made."""
    waiting = [root] if root is not None else []
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_NODES:
        waiting.sort(key=_number)
        node = waiting.pop()
        if node in seen or "AccumulateGrad" in node.name() or any(_number(node) in made for made in inside):
            continue
        seen.add(node)
        yield node
        waiting += [after for after, _ in node.next_functions if after is not None]


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def first_bad(root: Any, inside: Sequence[range], place: Place | None) -> LossOperation | None:
    """Of a loss that is not finite, before its backward: the innermost operation that can have made it so.

    None where the loss code was handed a number that was bad already: then it is not to blame.
    """
    nodes = list(nodes_behind(root, inside))
    for node in reversed(nodes):  # in the order in which the script made them
        kept = _kept(node)
        if samples := _bad_targets(dict(kept)):
            shown = ", ".join(map(str, samples[:5])) + (", …" if len(samples) > 5 else "")
            found = _located(node, place, note=f"is given a target that is not finite, of sample {shown}", made_it=True)
            return replace(found, samples=samples)
        bad_before = any(not is_finite(tensor) for name, tensor in kept if "result" not in name and "grad" not in name)
        if not bad_before and (note := _stumbles(node, kept)):
            return _located(node, place, note=note, made_it=True)
    if nodes and any(not is_finite(tensor) for _, tensor in _kept(nodes[-1])):
        return None
    suspect = [node for node in nodes if _kind(node) in _POLES]
    return _located(suspect[-1] if suspect else nodes[0], place) if nodes else None


@dataclass(frozen=True)
class Pole:
    """An operation of the loss code whose slope is infinite at 0, with what it was given or made."""

    node: Any
    values: torch.Tensor
    limit: float  # at or below it the slope is infinite

    def touched(self, place: Place | None) -> LossOperation | None:
        if self.values.numel() == 0 or float(self.values.abs().min()) > self.limit:
            return None
        return _located(self.node, place, note="has an infinite slope at 0, where it is", made_it=True)


def poles(root: Any, inside: Sequence[range]) -> list[Pole]:
    """Before the backward, which lets these numbers go: the poles of the loss code, if it is short and small."""
    found: list[Pole] = []
    for node in itertools.islice(nodes_behind(root, inside), _LOSS_NODES):  # of every term that a loss adds up
        kind = _kind(node)
        saved, limit = _SLOPES.get(kind, ("", 0.0))
        if saved and not (kind == "Pow" and not _is_a_root(node._saved_exponent)):
            values = getattr(node, saved)
            if values.numel() <= _SMALL:
                found.append(Pole(node, values.detach(), limit))
    return found


def _is_a_root(exponent: Any) -> bool:
    """Of a tensor it is not asked: each number has a slope of its own, and a device would have to be waited for."""
    return isinstance(exponent, (int, float)) and exponent < 1


def _kind(node: Any) -> str:
    return _without_suffix(node.name())


@functools.cache
def _without_suffix(name: str) -> str:
    """DivBackward0 -> Div"""
    return re.sub(r"Backward\d*$", "", name.rpartition("::")[2])


def _kept(node: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors that the operation kept for its backward; none once that has run."""
    found = []
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except RuntimeError:  # freed by a backward
                continue
            if isinstance(value, torch.Tensor):
                found.append((name, value.detach()))
    return found


def _stumbles(node: Any, kept: list[tuple[str, torch.Tensor]]) -> str:
    """What the operation stumbles over, judged by the numbers it kept."""
    kind, values = _kind(node), dict(kept)
    inner = values.get("_saved_self")
    if kind == "Div" and (below := values.get("_saved_other")) is not None and bool((below == 0).any()):
        return "divides by a sum that is 0" if below.numel() == 1 else "divides by 0"
    if kind in ("Log", "Log2", "Log10", "Log1P") and inner is not None:
        least = float(inner.min()) + (1.0 if kind == "Log1P" else 0.0)
        if least <= 0:
            return f"takes the logarithm of {least:g}"
    made = values.get("_saved_result")
    if kind in _MADE_OF and made is not None and not is_finite(made):
        return _MADE_OF[kind]
    if kind == "Pow" and inner is not None:
        return "raises a number to a power that it does not have" if _pow_fails(node, inner) else ""
    if kind.startswith("NllLoss") and (weight := values.get("_saved_total_weight")) is not None:
        averages = getattr(node, "_saved_reduction", 0) == _MEAN
        return "averages over labels that are all ignored" if averages and float(weight) == 0 else ""
    if kind == "Mean" and getattr(node, "_saved_self_sym_numel", 1) == 0:
        return "takes the mean of nothing"
    return ""


def _bad_targets(kept: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """The samples whose target is not finite, where the prediction is."""
    target, prediction = kept.get("_saved_target"), kept.get("_saved_self")
    if target is None or prediction is None or not target.is_floating_point() or not target.dim():
        return ()
    if is_finite(target) or not is_finite(prediction):
        return ()
    good = torch.isfinite(target.reshape(target.shape[0], -1)).all(dim=1)
    return tuple((~good).nonzero().flatten().tolist())


def _pow_fails(node: Any, inner: torch.Tensor) -> bool:
    exponent = getattr(node, "_saved_exponent", None)
    return isinstance(exponent, (int, float)) and not is_finite(inner.double() ** exponent)


def _located(node: Any, place: Place | None, *, note: str = "", made_it: bool = False) -> LossOperation:
    kind = _kind(node)
    if place is None:
        return LossOperation(kind, made_it=made_it, note=note)
    lines = [number for number, words in _words_by_line(place) if words & _wanted(kind)]
    # Once the loss line is reached, what follows `backward()` belongs to the next step.
    before = [number for number in lines if number <= place.line]
    line = before[0] if len(before) == 1 else 0
    function = _function_at(place, line) if line else place.function
    return LossOperation(kind, place.file, line or place.line, function, made_it, note)


def _wanted(kind: str) -> set[str]:
    return {kind.lower(), kind.lower() + "_", *(word.lower() for word in _TEXT.get(kind, ()))}


def _tree(place: Place) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(place.path)))
    except SyntaxError:  # the file has been edited since
        return ast.Module([], [])


def _functions_at(tree: ast.AST, line: int) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions that hold a line, the outermost first."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return sorted((f for f in functions if f.lineno <= line <= (f.end_lineno or 0)), key=lambda f: f.lineno)


def _function_at(place: Place, line: int) -> str:
    holds = _functions_at(_tree(place), line)
    return holds[-1].name if holds else "<module>"


def _words_by_line(place: Place) -> list[tuple[int, set[str]]]:
    """For each line of the function that calls backward: the operations that stand in it."""
    tree = _tree(place)
    holds = [function for function in _functions_at(tree, place.line) if function.name == place.function]
    words: dict[int, set[str]] = {}
    for node in ast.walk(holds[-1] if holds else tree):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Div, ast.Pow)):
            word = "div" if isinstance(node.op, ast.Div) else "pow"
            words.setdefault(node.lineno, set()).add(word)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if name:
                words.setdefault(node.func.end_lineno or node.lineno, set()).add(str(name).lower())
    return sorted(words.items())
