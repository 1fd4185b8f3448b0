"""What the script computes between its model and `backward()`: the operations, the numbers they kept, and their lines.

Such code cannot be run once more and leaves no traceback. What is left of it is the graph behind the loss, and in the
graph the numbers that each operation keeps for its backward, until that has run. A CPU knows whether the loss is finite
before its backward begins, and can look at all of them. A GPU tells only afterwards: then the small ones have been held
on to, and nobody has waited.

The line is the one between the forward call and `backward()` in the script's own function whose text holds the
operation, if there is exactly one. Where a framework calls `backward()`, that function is the one that called the
model: the one that started the framework knows nothing of a loss.
"""

from __future__ import annotations

import ast
import functools
import heapq
import itertools
import linecache
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from model_check.blackbox.box import BOX
from model_check.blackbox.device_numbers import local
from model_check.numerics.finite import finite as is_finite
from model_check.record.stacks import Frame

_TEXT = {
    "Norm": ("norm",),
    "LinalgVectorNorm": ("norm",),
    "Pow": ("pow", "square", "rsqrt"),
    "NllLoss": ("cross_entropy", "nll_loss", "criterion", "loss_fn", "CrossEntropyLoss"),
    "Logsumexp": ("logsumexp",),
    "Mean": ("mean",),
}

_PROBLEMS = {
    "empty_sum": "divides by a sum that is 0",
    "labels_ignored": "averages over labels that are all ignored",
    "empty_mean": "takes the mean of nothing",
    "zero_divisor": "divides by 0",
    "logarithm": "takes the logarithm of {}",
    "negative_root": "takes the root of a negative number",
    "exponential": "takes the exponential of a number that is too large",
    "no_such_power": "raises a number to a power that it does not have",
    "bad_target": "is given a target that is not finite, of sample {}",
    "infinite_slope": "has an infinite slope at 0, where it is",
    "first_given": "is the first operation that is given a number that is not finite",
}
_EMPTY = frozenset({"empty_sum", "labels_ignored", "empty_mean"})
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Div: "div",
    ast.Pow: "pow",
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
}


@dataclass(frozen=True)
class Problem:
    """What an operation stumbles over: a key of `_PROBLEMS`, and the value that its sentence needs."""

    kind: str
    value: str = ""

    @property
    def text(self) -> str:
        return _PROBLEMS[self.kind].format(self.value)


@dataclass(frozen=True)
class LossOperation:
    """One operation of the loss code, and the line it stands in, 0 where that cannot be told."""

    op: str
    file: str = ""
    line: int = 0
    function: str = ""
    made_it: bool = False  # its inputs were finite and its result was not: seen, not guessed
    problem: Problem | None = None
    samples: tuple[int, ...] = ()  # of the targets it was given, those that are not finite

    @property
    def name(self) -> str:
        return self.op.lower()

    @property
    def site(self) -> str | None:
        return f"{self.file}:{self.line}" if self.line else None

    @property
    def note(self) -> str:
        """What it stumbled over, as the end of a sentence about it; empty: not known."""
        return f": it {self.problem.text}" if self.problem is not None else ""

    @property
    def empty(self) -> bool:
        """It divides by a count that is 0."""
        return self.problem is not None and self.problem.kind in _EMPTY


@dataclass(frozen=True)
class Place:
    """Where the script calls backward: its own frame, read while it stands there."""

    file: str
    line: int
    function: str
    path: str
    first: int = 0  # of the lines of that function in which the loss code may stand
    last: int | None = None  # None: the line itself is the last, for what follows `backward()` is the next step's

    @property
    def site(self) -> str:
        return f"{self.file}:{self.line}"

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

    def or_of_forward(self, called: Frame | None) -> Place:
        """Where the loss code stands, if a framework calls backward: this is then the line that started the framework.

        `called`: the line from which the model was called. Of a loss that the framework was handed there
        is nothing in the function that handed the whole loop to it.
        """
        if called is None:
            return self
        file, line, function = called.file, called.line, called.function
        if (file, line) == (self.file, self.line):
            return replace(self, first=line)
        path = BOX.code.path_of(file)
        if path is None or (file, function) == (self.file, self.function) or self._holds_the_loss():
            return self
        if function.startswith("<"):  # a lambda: no function of this name stands in the file
            return Place(file, line, function, path, first=line)
        return Place(file, line, function, path, last=sys.maxsize)

    def _holds_the_loss(self) -> bool:
        return re.search("backward|loss", linecache.getline(self.path, self.line), re.IGNORECASE) is not None


def located(kind: str, place: Place | None, *, problem: Problem | None = None, made_it: bool = False) -> LossOperation:
    """`kind`: of the operation, as autograd names it, without its suffix."""
    if place is None:
        return LossOperation(kind, made_it=made_it, problem=problem)
    possible = [number for number in lines_with(kind, place) if place.first <= number <= (place.last or place.line)]
    line = possible[0] if len(possible) == 1 else 0
    function = _function_at(place, line) if line else place.function
    return LossOperation(kind, place.file, line or place.line, function, made_it, problem)


def lines_with(kind: str, place: Place) -> list[int]:
    """The lines of the place's function that contain that operation."""
    return [number for number, words in _words_by_line(place) if words & _wanted(kind)]


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


def _is_told_in_words(call: ast.Call) -> bool:
    """self.log("loss", loss) is no logarithm."""
    first = call.args[0] if call.args else None
    return isinstance(first, (ast.JoinedStr, ast.Dict)) or (
        isinstance(first, ast.Constant) and isinstance(first.value, str)
    )


def _words_by_line(place: Place) -> list[tuple[int, set[str]]]:
    """For each line of the function that calls backward: the operations that stand in it."""
    tree = _tree(place)
    holds = [function for function in _functions_at(tree, place.line) if function.name == place.function]
    words: dict[int, set[str]] = {}
    for node in ast.walk(holds[-1] if holds else tree):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and (word := _OPERATORS.get(type(node.op))):
            by = node.right if isinstance(node, ast.BinOp) else node.value
            if word in ("div", "pow") or not isinstance(by, ast.Constant):  # `calls += 1` is not part of a loss
                words.setdefault(node.lineno, set()).add(word)
        elif isinstance(node, ast.Call) and not _is_told_in_words(node):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if name:
                words.setdefault(node.func.end_lineno or node.lineno, set()).add(str(name).lower())
    return sorted(words.items())


_MOST_NODES = 200
_FEW_NODES = 16  # are held on to in every step
_SMALL = 1 << 19  # bytes
_MOST_HELD = 64  # of a list or a dict of losses
_MEAN = 1  # as torch numbers the ways to reduce a loss
# Operations whose derivative has a pole, and those that make infinity or NaN of finite numbers, as autograd names them.
_POLES = frozenset(
    {"Sqrt", "Rsqrt", "Pow", "Log", "Log2", "Log10", "Log1P", "Div", "Reciprocal", "Std", "Var", "Acos", "Asin"}
    | {"Atan2", "Cdist", "Xlogy", "Exp", "Logsumexp", "NllLoss", "NllLoss2D"}
)
# Those whose slope is infinite where a number that they keep is at or below a limit.
_SLOPES = {
    "Sqrt": ("_saved_result", 0.0),
    "Pow": ("_saved_self", 0.0),
    "Log": ("_saved_self", 1e-38),
}
_MADE_OF = {
    "Sqrt": Problem("negative_root"),
    "Rsqrt": Problem("zero_divisor"),
    "Reciprocal": Problem("zero_divisor"),
    "Exp": Problem("exponential"),
}
_LOGARITHMS = ("Log", "Log2", "Log10", "Log1P")
_saved_names: dict[str, tuple[str, ...]] = {}


@dataclass(frozen=True)
class Operation:
    """One node of the graph, and what it keeps for its backward."""

    kind: str
    tensors: Mapping[str, torch.Tensor]
    plain: Mapping[str, Any]  # numbers and flags
    versions: Mapping[str, int]  # of the tensors, when they were read: the script may write to them afterwards
    complete: bool = True  # nothing that it keeps was left out

    @classmethod
    def of(cls, node: Any, most: int | None = None) -> Operation:
        """`most`: how many bytes of memory a tensor may keep that is held on to, as a part of a larger one too."""
        tensors, plain, complete = {}, {}, True
        for name in _names_of(node):
            try:
                value = getattr(node, name)
            except RuntimeError:  # freed by a backward
                continue
            if not isinstance(value, torch.Tensor):
                plain[name] = value
                continue
            here = local(value)
            if here is not None and _in_memory(here) and (most is None or here.untyped_storage().nbytes() <= most):
                tensors[name] = here.detach()
            else:
                complete = False
        return cls(_kind(node), tensors, plain, {name: t._version for name, t in tensors.items()}, complete)

    @classmethod
    def unread(cls, node: Any) -> Operation:
        return cls(_kind(node), {}, {}, {}, complete=False)

    def kept(self) -> dict[str, torch.Tensor]:
        """Those that are still what they were."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor._version == self.versions[name]}

    def problem(self) -> Problem | None:
        """What it stumbles over, judged by the numbers it kept."""
        kept = self.kept()
        inner, made = kept.get("_saved_self"), kept.get("_saved_result")
        if self.kind == "Div" and (below := kept.get("_saved_other")) is not None and bool((below == 0).any()):
            return Problem("empty_sum" if below.numel() == 1 else "zero_divisor")
        if self.kind in _LOGARITHMS and inner is not None:
            least = float(inner.min()) + (1.0 if self.kind == "Log1P" else 0.0)
            if least <= 0:
                return Problem("logarithm", f"{least:g}")
        if self.kind in _MADE_OF and made is not None and not is_finite(made):
            return _MADE_OF[self.kind]
        if self.kind == "Pow" and inner is not None and self._has_no_power(inner):
            return Problem("no_such_power")
        if self.kind.startswith("NllLoss") and (weight := kept.get("_saved_total_weight")) is not None:
            averages = self.plain.get("_saved_reduction", 0) == _MEAN
            return Problem("labels_ignored") if averages and float(weight) == 0 else None
        if self.kind == "Mean" and self.plain.get("_saved_self_sym_numel", 1) == 0:
            return Problem("empty_mean")
        return None

    def divides_by_a_finite_number(self) -> bool:
        """Frameworks divide each loss by the number of batches they accumulate: that makes no NaN."""
        below = self.kept().get("_saved_other", self.plain.get("_saved_other"))
        if self.kind != "Div" or below is None:
            return False
        below = torch.as_tensor(below)
        return is_finite(below) and bool((below != 0).all())

    def _has_no_power(self, inner: torch.Tensor) -> bool:
        exponent = self.plain.get("_saved_exponent")
        return isinstance(exponent, (int, float)) and not is_finite(inner.double() ** exponent)

    def is_given_bad_numbers(self) -> bool:
        given = (tensor for name, tensor in self.kept().items() if "result" not in name and "grad" not in name)
        return any(not is_finite(tensor) for tensor in given)

    def bad_targets(self) -> tuple[int, ...]:
        """The samples whose target is not finite, where the prediction is."""
        kept = self.kept()
        target, prediction = kept.get("_saved_target"), kept.get("_saved_self")
        if target is None or prediction is None or not target.is_floating_point() or not target.dim():
            return ()
        if is_finite(target) or not is_finite(prediction):
            return ()
        good = torch.isfinite(target.reshape(target.shape[0], -1)).all(dim=1)
        return tuple((~good).nonzero().flatten().tolist())

    def is_at_its_pole(self) -> bool:
        """Its slope is infinite at a number that it was given."""
        saved, limit = _SLOPES.get(self.kind, ("", 0.0))
        values = self.kept().get(saved)
        if values is None or not values.numel() or (self.kind == "Pow" and not self._is_a_root()):
            return False
        return float(values.abs().min()) <= limit

    def _is_a_root(self) -> bool:
        """Of a tensor it is not asked: each number has a slope of its own."""
        exponent = self.plain.get("_saved_exponent")
        return isinstance(exponent, (int, float)) and exponent < 1


@dataclass(frozen=True)
class LossCode:
    """The operations between a model and its loss, from the loss inwards, and where the script calls `backward`."""

    operations: Sequence[Operation] = ()
    place: Place | None = None
    cut_off: bool = False  # there is more of it, nearer to the model

    @classmethod
    def whole(cls, root: Any, inside: Sequence[range], place: Place | None) -> LossCode:
        """To be looked at now. `inside`: the numbers of the nodes that modules' forwards made."""
        nodes = list(itertools.islice(nodes_behind(root, inside), _MOST_NODES + 1))
        return cls([Operation.of(node) for node in nodes[:_MOST_NODES]], place, len(nodes) > _MOST_NODES)

    @classmethod
    def held(cls, root: Any, inside: Sequence[range], place: Place | None, *, finite: bool = False) -> LossCode:
        """To be looked at when the backward has let its numbers go: of a few operations, what is small.

        `finite`: the loss is known to be, so that only its slopes can be at fault.
        """
        fails = _can_have_a_pole if finite else _can_fail
        nodes = list(itertools.islice(nodes_behind(root, inside), _FEW_NODES + 1))  # of every term that a loss adds up
        operations = [
            Operation.of(node, _SMALL) if fails(node) else Operation.unread(node) for node in nodes[:_FEW_NODES]
        ]
        return cls(operations, place, len(nodes) > _FEW_NODES)

    @property
    def can_fail(self) -> bool:
        return any(operation.tensors or operation.plain for operation in self.operations)

    def first_bad(self) -> LossOperation | None:
        """Of a loss that is not finite: the innermost operation that can have made it so.

        None where the loss code was handed a number that was bad already, or may have been, or where its beginning is
        not known: no operation is to blame.
        """
        for operation in reversed(self.operations):  # in the order in which the script made them
            if samples := operation.bad_targets():
                shown = ", ".join(map(str, samples[:5])) + (", …" if len(samples) > 5 else "")
                problem = Problem("bad_target", shown)
                return replace(located(operation.kind, self.place, problem=problem, made_it=True), samples=samples)
            if not operation.is_given_bad_numbers() and (stumbled := operation.problem()) is not None:
                return located(operation.kind, self.place, problem=stumbled, made_it=True)
        if not self.operations or self.cut_off:
            return None
        innermost = self.operations[-1]
        if not innermost.complete or not all(map(is_finite, innermost.kept().values())):
            return None
        able = [operation for operation in self.operations if not operation.divides_by_a_finite_number()]
        suspect = [operation for operation in able if operation.kind in _POLES]
        given = [operation for operation in able if operation.is_given_bad_numbers()]
        found = suspect[-1:] or given[-1:] or able[:1] or self.operations[:1]
        return located(found[0].kind, self.place)

    def at_a_pole(self) -> LossOperation | None:
        """Of a finite loss whose gradients are not: the operation that made them so."""
        found = next((operation for operation in self.operations if operation.is_at_its_pole()), None)
        if found is None:
            return None
        return located(found.kind, self.place, problem=Problem("infinite_slope"), made_it=True)


NO_CODE = LossCode()


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
                    found.append((number_of(tensor.grad_fn), tensor, place))
    bad = [(number, tensor, place) for number, tensor, place in found if not is_finite(tensor)]
    return max(bad, key=lambda item: item[0])[1:] if bad else None


def _may_be_loss(tensor: torch.Tensor, since: int) -> bool:
    node = tensor.grad_fn
    return node is not None and tensor.numel() == 1 and tensor.is_floating_point() and number_of(node) >= since


def nodes_behind(root: Any, inside: Sequence[range]) -> Iterator[Any]:
    """The graph's nodes from the loss inwards, without those that a module's forward made."""
    waiting = [(-number_of(root), 0, root)] if root is not None else []
    seen: set[Any] = set()
    met = itertools.count(1)  # of two with one number the first that was met comes first
    while waiting:
        number, _, node = heapq.heappop(waiting)
        if node in seen or "AccumulateGrad" in node.name() or any(-number in made for made in inside):
            continue
        seen.add(node)
        yield node
        for after, _ in node.next_functions:
            if after is not None:
                heapq.heappush(waiting, (-number_of(after), next(met), after))


def _can_have_a_pole(node: Any) -> bool:
    return _kind(node) in _SLOPES


def _can_fail(node: Any) -> bool:
    return _kind(node) in _POLES or _kind(node) == "Mean" or "_saved_target" in _names_of(node)


def _in_memory(tensor: torch.Tensor) -> bool:
    """FSDP frees the memory of a gathered parameter but leaves the tensor; reading it would be a segmentation fault."""
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def number_of(node: Any) -> int:
    """The sequence number of a node: a thread numbers its graph's nodes as it makes them."""
    return int(node._sequence_nr())


def _kind(node: Any) -> str:
    return _without_suffix(node.name())


@functools.cache
def _without_suffix(name: str) -> str:
    """DivBackward0 -> Div"""
    return re.sub(r"Backward\d*$", "", name.rpartition("::")[2])


def _names_of(node: Any) -> tuple[str, ...]:
    """Of what an operation keeps; all of one name have the same."""
    name = node.name()
    names = _saved_names.get(name)
    if names is None:
        names = _saved_names[name] = tuple(saved for saved in dir(node) if saved.startswith("_saved_"))
    return names
