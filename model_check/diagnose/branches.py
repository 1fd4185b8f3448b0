"""What the source says about the way to a line: whether only some ranks get there, and who catches what it raises.

Static and by name: a function counts as reached only through a condition if every call of that name in its file is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from model_check.diagnose.frames import Frame
from model_check.diagnose.source import source_lines

_ASKS_FOR_THE_RANK = re.compile(
    r"rank|is_(local_)?(main|master|leader|chief)|main_process|(process|global)_zero|primary", re.I
)
_MOST_CALLERS = 3  # functions up from the line
_NO_FAULTS = frozenset({"KeyboardInterrupt", "SystemExit", "StopIteration", "GeneratorExit"})
_LEAVES = (ast.Raise, ast.Return, ast.Break)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Branch:
    """A condition on the rank, as it stands in the source."""

    test: str
    site: str


@dataclass(frozen=True)
class Handler:
    """An `except` after which the loop around it goes on."""

    text: str
    frame: Frame


@lru_cache(maxsize=32)
def _tree(file: str, root: str) -> ast.Module | None:
    try:
        return ast.parse("\n".join(source_lines(file, root)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _contains(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", 0) <= line <= (getattr(node, "end_lineno", 0) or 0)


def _path_to(tree: ast.AST, line: int) -> list[ast.AST]:
    """The statements around a line, from the outermost inwards."""
    path: list[ast.AST] = []
    node: ast.AST | None = tree
    while node is not None:
        node = next((child for child in _statements(node) if _contains(child, line)), None)
        if node is not None:
            path.append(node)
    return path


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler)) or type(child).__name__ == "match_case":
            yield child


def rank_branch(frame: Frame) -> Branch | None:
    """The condition on the rank under which a line runs, in its own function or at every call of that function."""
    tree = _tree(frame.file, frame.root)
    return _branch(tree, frame.file, frame.line, _MOST_CALLERS) if tree is not None else None


def _branch(tree: ast.Module, file: str, line: int, callers: int) -> Branch | None:
    function: _Function | None = None
    for node in reversed(_path_to(tree, line)):
        if isinstance(node, ast.If) and any(_contains(child, line) for child in (*node.body, *node.orelse)):
            test = ast.unparse(node.test)
            if _ASKS_FOR_THE_RANK.search(test):
                return Branch(f"if {test}", f"{file}:{node.lineno}")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node
            break
    if function is None or callers == 0:
        return None
    found = [_branch(tree, file, call, callers - 1) for call in _calls_of(tree, function.name)]
    return found[0] if found and all(branch is not None for branch in found) else None


def _calls_of(tree: ast.Module, name: str) -> list[int]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [c.lineno for c in calls if name in (getattr(c.func, "id", None), getattr(c.func, "attr", None))]


def swallowing_handler(frame: Frame) -> Handler | None:
    """The handler around a line that lets the loop around it go on, so that the line is skipped and nothing is said."""
    tree = _tree(frame.file, frame.root)
    path = _path_to(tree, frame.line) if tree is not None else []
    for at, node in enumerate(path):
        in_body = isinstance(node, ast.Try) and any(_contains(child, frame.line) for child in node.body)
        if not in_body or not any(isinstance(outer, (ast.For, ast.AsyncFor, ast.While)) for outer in path[:at]):
            continue
        assert isinstance(node, ast.Try), f"{type(node).__name__} has a body that is tried"
        for handler in node.handlers:
            caught = ast.unparse(handler.type) if handler.type is not None else ""
            leaves = any(isinstance(inner, _LEAVES) for inner in ast.walk(handler))
            if caught not in _NO_FAULTS and not leaves:
                text = f"except {caught}:" if caught else "except:"
                return Handler(text, Frame(frame.file, handler.lineno, frame.function, root=frame.root))
    return None


def only_system_exit(frame: Frame) -> Frame | None:
    """The `raise SystemExit` in the file of a line; None where there is none, or more than one."""
    tree = _tree(frame.file, frame.root)
    raises = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)] if tree is not None else []
    lines = [node.lineno for node in raises if node.exc is not None and _raised_name(node.exc) == "SystemExit"]
    return Frame(frame.file, lines[0], "", root=frame.root) if len(lines) == 1 else None


def _raised_name(raised: ast.expr) -> str:
    named = raised.func if isinstance(raised, ast.Call) else raised
    return named.id if isinstance(named, ast.Name) else ""
