"""The line of an operation that the script computes outside any module, from the operation's name.

Such code leaves no traceback. The line is the one between the forward call and `backward()` in the script's own
function whose text holds that operation, if there is exactly one. Where a framework calls `backward()`, that function
is the one that called the model: the one that started the framework knows nothing of a loss.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from dataclasses import dataclass, replace
from types import FrameType

from model_check.blackbox.box import BOX

_TEXT = {
    "Norm": ("norm",),
    "LinalgVectorNorm": ("norm",),
    "Pow": ("pow", "square", "rsqrt"),
    "NllLoss": ("cross_entropy", "nll_loss", "criterion", "loss_fn", "CrossEntropyLoss"),
    "Logsumexp": ("logsumexp",),
    "Mean": ("mean",),
}

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Div: "div",
    ast.Pow: "pow",
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
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
    first: int = 0  # of the lines of that function in which the loss code may stand
    last: int | None = None  # None: the line itself is the last, for what follows `backward()` is the next step's

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

    def or_of_forward(self, called: tuple[str, int, str] | None) -> Place:
        """Where the loss code stands, if a framework calls backward: this is then the line that started the framework.

        `called`: file, line and function from which the model was called. Of a loss that the framework was handed there
        is nothing in the function that handed the whole loop to it.
        """
        if called is None:
            return self
        file, line, function = called
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


def located(kind: str, place: Place | None, *, note: str = "", made_it: bool = False) -> LossOperation:
    """`kind`: of the operation, as autograd names it, without its suffix."""
    if place is None:
        return LossOperation(kind, made_it=made_it, note=note)
    possible = [number for number in lines_with(kind, place) if place.first <= number <= (place.last or place.line)]
    line = possible[0] if len(possible) == 1 else 0
    function = _function_at(place, line) if line else place.function
    return LossOperation(kind, place.file, line or place.line, function, made_it, note)


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
