"""What the source says about the way to a line: whether only some ranks get there, and who catches what it raises.

Static and by name: a function counts as reached only through a condition if every call of that name in its file is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from model_check.diagnose.rank_names import asks_for_the_rank, names_its_ranks
from model_check.diagnose.source import Loop, loops_at, source_lines
from model_check.record.stacks import Frame

_MOST_CALLERS = 3  # functions up from the line
_NO_FAULTS = frozenset({"KeyboardInterrupt", "SystemExit", "StopIteration", "GeneratorExit"})
_MATCH = (ast.Match,)
_SPEAKS = re.compile(r"print|log|warn|write|traceback|excepthook|exit|abort|kill|barrier|reduce|gather|broadcast")
_GOES = (ast.Return, ast.Break, ast.Continue)  # not a raise: a check that all ranks pass looks the same
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Branch:
    """A condition on the rank, as it stands in the source."""

    test: str
    site: str
    names_them: bool  # the condition names the ranks that reach the line, not the ones it excludes


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
        if isinstance(node, _FUNCTIONS):
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
        if isinstance(node, _FUNCTIONS):
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


def loops_around(frame: Frame) -> list[Loop]:
    """The loops around a line, innermost first: in its own function, then around every call of that function."""
    tree = _tree(frame.file, frame.root)
    return _loops_around(tree, frame, frame.line, _MOST_CALLERS) if tree is not None else []


def _loops_around(tree: ast.Module, frame: Frame, line: int, callers: int) -> list[Loop]:
    found = loops_at(frame, line)
    functions = [node for node in _path_to(tree, line) if isinstance(node, _FUNCTIONS)]
    if not functions or callers == 0:
        return found
    # An `optimizer.step()` inside a method named `step` does not call that method.
    calls = [call for call in _calls_of(tree, functions[-1].name) if not _contains(functions[-1], call)]
    around = [_loops_around(tree, frame, call, callers - 1) for call in calls]
    common = [loop for loop in around[0] if all(loop in other for other in around)] if around else []
    return [*found, *(loop for loop in common if loop not in found)]


def is_outside(frame: Frame, loop: tuple[int, int]) -> bool:
    """Whether a line of the loop's file is outside the loop and every function the loop calls, directly or not."""
    tree = _tree(frame.file, frame.root)
    if tree is None or loop[0] <= frame.line <= loop[1]:
        return False
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    spans, reached = [loop], set[str]()
    while spans:
        first, last = spans.pop()
        called = {f for f in functions if any(first <= line <= last for line in _calls_of(tree, f.name))}
        new = {f for f in called if f.name not in reached}
        reached |= {f.name for f in new}
        spans += [(f.lineno, f.end_lineno or f.lineno) for f in new]
    return frame.function.rpartition(".")[2] not in reached


def swallowing_handler(frame: Frame) -> Handler | None:
    """The code that silently lets a rank skip a line: an `except`, a context manager, or a `finally` that returns. It
    may be in the line's own function, in a decorator of it, or around its calls.

    None if the source has another way past the line, such as an `if` or a `continue`: the two cannot be told apart.
    """
    tree = _tree(frame.file, frame.root)
    if tree is None:
        return None
    found = _swallower(tree, frame.line, _MOST_CALLERS)
    if found is None or not _in_a_loop(tree, frame.line, _MOST_CALLERS):
        return None
    text, line = found
    return Handler(text, Frame(frame.file, line, frame.function, root=frame.root))


def _swallower(tree: ast.Module, line: int, callers: int) -> tuple[str, int] | None:
    """The text and line of the code that swallows an exception raised at `line`."""
    path = _path_to(tree, line)
    for node in reversed(path):
        if isinstance(node, _FUNCTIONS):
            if _leaves_before(node, line):
                return None
            around = [found for made in node.decorator_list if (found := _in_decorator(tree, made))]
            calls = _calls_of(tree, node.name) if callers else []
            around += [found for call in calls if (found := _swallower(tree, call, callers - 1))]
            return around[0] if around else None
        if isinstance(node, (ast.If, *_MATCH)):
            return None
        if (found := _swallows(tree, node, line)) is not None:
            return None if _leaves_before(node, line) else found
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and _leaves_before(node, line):
            return None
    return None


def _swallows(tree: ast.Module, node: ast.AST, line: int | None) -> tuple[str, int] | None:
    """The part of this statement that silently catches what `line` raises (`line` None: what any line in it raises)."""
    body = getattr(node, "body", [])
    if line is not None and not any(_contains(child, line) for child in body if isinstance(child, ast.AST)):
        return None
    if isinstance(node, (ast.With, ast.AsyncWith)):
        silent = [item.context_expr for item in node.items if _is_silent(tree, item.context_expr)]
        return (f"with {ast.unparse(silent[0])}:", node.lineno) if silent else None
    if not isinstance(node, ast.Try):
        return None
    for handler in node.handlers:
        caught = ast.unparse(handler.type) if handler.type is not None else ""
        if caught not in _NO_FAULTS and not _reports_or_ends(handler):
            return (f"except {caught}:" if caught else "except:"), handler.lineno
    leaving = [inner for inner in node.finalbody if isinstance(inner, _GOES)]
    return (f"finally: {ast.unparse(leaving[0])}", leaving[0].lineno) if leaving else None


def _is_silent(tree: ast.Module, given: ast.expr) -> bool:
    """Whether a context manager swallows exceptions: `suppress`, or one defined in this file whose `__exit__` returns
    True or whose `yield` is in a silent `try`.
    """
    name = ast.unparse(given.func if isinstance(given, ast.Call) else given).rpartition(".")[2]
    if name == "suppress" and isinstance(given, ast.Call):
        return not {ast.unparse(kind) for kind in given.args} <= _NO_FAULTS
    for made in ast.walk(tree):
        if getattr(made, "name", None) != name:
            continue
        if isinstance(made, ast.ClassDef):
            exits = [f for f in made.body if isinstance(f, _FUNCTIONS) and f.name in ("__exit__", "__aexit__")]
            return any(_returns_true(function) and not _reports_or_ends(function) for function in exits)
        if isinstance(made, _FUNCTIONS) and any("contextmanager" in ast.unparse(d) for d in made.decorator_list):
            yields = [node.lineno for node in ast.walk(made) if isinstance(node, ast.Yield)]
            tried = [node for node in ast.walk(made) if isinstance(node, ast.Try)]
            return any(_swallows(tree, node, line) is not None for node in tried for line in yields)
    return False


def _returns_true(function: ast.AST) -> bool:
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    return bool(returned) and all(isinstance(value, ast.Constant) and value.value is True for value in returned)


def _reports_or_ends(handler: ast.AST) -> bool:
    """Whether the handler ends the loop, or prints or logs the exception, which would have left a record."""
    for node in ast.walk(handler):
        if isinstance(node, (ast.Raise, ast.Break)):
            return True
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).lower()
            if _SPEAKS.search(called):
                return True
    return False


def _leaves_before(outer: ast.AST, line: int) -> bool:
    """Whether control can leave `outer`, or end the iteration, before a line without an exception."""
    inner = [node for node in ast.walk(outer) if isinstance(node, (*_GOES, ast.Yield)) and node.lineno < line]
    handled = [node for node in ast.walk(outer) if isinstance(node, ast.ExceptHandler)]
    return any(not any(_contains(handler, node.lineno) for handler in handled) for node in inner)


def _in_decorator(tree: ast.Module, made: ast.expr) -> tuple[str, int] | None:
    """The handler in a decorator from the same file that swallows the decorated function's exceptions."""
    name = made.func if isinstance(made, ast.Call) else made
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == getattr(name, "id", None)]
    tried = [node for function in functions for node in ast.walk(function) if isinstance(node, (ast.Try, ast.With))]
    return next((found for node in tried if (found := _swallows(tree, node, None)) is not None), None)


def _in_a_loop(tree: ast.Module, line: int, callers: int) -> bool:
    path = _path_to(tree, line)
    functions = [node for node in path if isinstance(node, _FUNCTIONS)]
    if any(isinstance(node, (ast.For, ast.AsyncFor, ast.While)) for node in path):
        return True
    return bool(functions and callers) and any(
        _in_a_loop(tree, call, callers - 1) for call in _calls_of(tree, functions[-1].name)
    )


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
