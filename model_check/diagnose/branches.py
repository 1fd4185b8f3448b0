"""What the source says about the way to a line: whether only some ranks get there, and who catches what it raises.

Static and by name: a function counts as reached only through a condition if every call of that name in its file is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from model_check.diagnose.frames import Frame
from model_check.diagnose.rank_names import asks_for_the_rank, names_its_ranks
from model_check.diagnose.source import source_lines

_MOST_CALLERS = 3  # functions up from the line
_NO_FAULTS = frozenset({"KeyboardInterrupt", "SystemExit", "StopIteration", "GeneratorExit"})
_LEAVES = (ast.Raise, ast.Return, ast.Break)
_GOES = (ast.Return, ast.Break, ast.Continue)  # not a raise: a check that all ranks pass looks the same
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Branch:
    """A condition on the rank, as it stands in the source."""

    test: str
    site: str
    names_them: bool  # it names the ranks that get to the line, rather than those that do not


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


def conditions_of(frame: Frame) -> list[str]:
    """The statement at a line, and the conditions in its own function under which it runs."""
    tree = _tree(frame.file, frame.root)
    found: list[str] = []
    for node in _path_to(tree, frame.line) if tree is not None else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.clear()
        elif isinstance(node, (ast.If, ast.While)):
            found.append(ast.unparse(node.test))
        elif isinstance(node, (ast.Assert, ast.Raise, ast.Expr)):
            found.append(ast.unparse(node))
    return found


def _branch(tree: ast.Module, file: str, line: int, callers: int) -> Branch | None:
    function: _Function | None = None
    path = _path_to(tree, line)
    for outer, node in reversed(list(zip([tree, *path], path, strict=False))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node
            break
        if isinstance(node, ast.If) and any(_contains(child, line) for child in (*node.body, *node.orelse)):
            test = ast.unparse(node.test)
            if asks_for_the_rank(node.test, tree):
                in_body = any(_contains(child, line) for child in node.body)
                named = names_its_ranks(node.test, tree) is in_body
                return Branch(f"if {test}", f"{file}:{node.lineno}", named)
        if left := _left_before(node, outer, tree):
            text = f"if {ast.unparse(left.test)}: {ast.unparse(left.body[-1])}"
            return Branch(text, f"{file}:{left.lineno}", names_its_ranks(left.test, tree) is False)
    if function is None or callers == 0:
        return None
    found = [_branch(tree, file, call, callers - 1) for call in _calls_of(tree, function.name)]
    return found[0] if found and all(branch is not None for branch in found) else None


def _left_before(node: ast.AST, outer: ast.AST, tree: ast.Module) -> ast.If | None:
    """`if rank != 0: return` ahead of a statement in its block: from there on only some ranks go on."""
    blocks = [block for _, block in ast.iter_fields(outer) if isinstance(block, list) and node in block]
    for before in (statement for block in blocks for statement in block[: block.index(node)]):
        if not isinstance(before, ast.If) or before.orelse or not isinstance(before.body[-1], _GOES):
            continue
        if asks_for_the_rank(before.test, tree):
            return before
    return None


def _calls_of(tree: ast.Module, name: str) -> list[int]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [c.lineno for c in calls if name in (getattr(c.func, "id", None), getattr(c.func, "attr", None))]


def is_outside(frame: Frame, loop: tuple[int, int]) -> bool:
    """Whether a line of the loop's file is neither in the loop nor in a function that it calls, directly or not."""
    tree = _tree(frame.file, frame.root)
    if tree is None or loop[0] <= frame.line <= loop[1]:
        return False
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    spans, reached = [loop], set[str]()
    while spans:
        first, last = spans.pop()
        called = {f for f in functions if any(first <= line <= last for line in _calls_of(tree, f.name))}
        new = {f for f in called if f.name not in reached}
        reached |= {f.name for f in new}
        spans += [(f.lineno, f.end_lineno or f.lineno) for f in new]
    return frame.function.rpartition(".")[2] not in reached


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


def held_in_finally(stands: Frame, raised: Frame) -> bool:
    """Whether the line it stands at is in the `finally` of a `try` that the exception left and that catches nothing."""
    tree = _tree(stands.file, stands.root)
    if tree is None or raised.file != stands.file:
        return False
    inside = [node for node in _path_to(tree, raised.line) if isinstance(node, ast.Try)]
    for at, node in enumerate(inside):
        leaves = any(_contains(child, raised.line) for child in node.body)
        waits = any(_contains(child, stands.line) for child in node.finalbody)
        if leaves and waits:
            return not any(caught.handlers for caught in inside[at:])
    return False


def only_system_exit(frame: Frame, code: int | None) -> Frame | None:
    """The `raise SystemExit` in the file of a line that gives this code; None where there is none, or more than one."""
    tree = _tree(frame.file, frame.root)
    raises = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)] if tree is not None else []
    exits = [node for node in raises if node.exc is not None and _raised_name(node.exc) == "SystemExit"]
    lines = [node.lineno for node in exits if _may_give(node.exc, code)]
    return Frame(frame.file, lines[0], "", root=frame.root) if len(lines) == 1 else None


def _may_give(raised: ast.expr | None, code: int | None) -> bool:
    """A constant code is the one or is not; words give 1; what is computed may be anything."""
    given = raised.args[0] if isinstance(raised, ast.Call) and raised.args else None
    if not isinstance(given, ast.Constant):
        return given is not None or code == 0
    return given.value == code if isinstance(given.value, int) else code == 1


def _raised_name(raised: ast.expr) -> str:
    named = raised.func if isinstance(raised, ast.Call) else raised
    return named.id if isinstance(named, ast.Name) else ""
