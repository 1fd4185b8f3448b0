"""Which expressions of a script ask for the rank: by their words, or by a name that was given the rank before."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

_WORDS = re.compile(
    r"(?<!lora_)(?<!low_)rank(?!ing|ed)|is_(local_)?(main|master|leader|chief)|main_process|(process|global)_zero|primary",
    re.I,
)
_STARTERS = frozenset({"spawn", "start_processes", "notebook_launcher"})
_CONVERSIONS = frozenset({"int", "bool", "str", "abs"})
_MOST_ROUNDS = 4  # r = get_rank(); first = r == 0; quiet = not first; …


def asks_for_the_rank(test: ast.expr, tree: ast.Module) -> bool:
    """Whether a condition depends on which rank runs it."""
    if _asks_whether_it_is_set(test):
        return False
    if _WORDS.search(ast.unparse(test)):
        return True
    known = names_of_the_rank(tree)
    return any(isinstance(node, ast.Name) and node.id in known for node in ast.walk(test))


def names_its_ranks(test: ast.expr, tree: ast.Module) -> bool | None:
    """Whether a condition names the ranks that meet it (`rank in (0, 1)`, `is_main`) or the others (`rank != 2`).

    None if it does neither: `rank < 2` splits them into two groups.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        named = names_its_ranks(test.operand, tree)
        return None if named is None else not named
    if isinstance(test, ast.BoolOp):
        return next((names_its_ranks(part, tree) for part in test.values if asks_for_the_rank(part, tree)), None)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        how = test.ops[0]
        return isinstance(how, (ast.Eq, ast.In)) if isinstance(how, (ast.Eq, ast.In, ast.NotEq, ast.NotIn)) else None
    # A flag names its ranks; a number is true for all ranks but 0.
    return not ast.unparse(test).removesuffix("()").lower().endswith("rank")


def _asks_whether_it_is_set(test: ast.expr) -> bool:
    """`rank is None`, `"RANK" in os.environ`, `local_rank != -1`: the same answer on all ranks."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _asks_whether_it_is_set(test.operand)
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    (how,), (what,) = test.ops, test.comparators
    if isinstance(how, (ast.In, ast.NotIn)):
        return isinstance(test.left, ast.Constant)
    return ast.unparse(what) in ("None", "-1")


@lru_cache(maxsize=32)
def names_of_the_rank(tree: ast.Module) -> frozenset[str]:
    """Names that hold a rank or a question about it, whatever they are called.

    Only values made of nothing else count: a model on `cuda:{rank}` says nothing about the rank when it is asked.
    """
    known = set(_first_parameters_of_rank_functions(tree))
    for _ in range(_MOST_ROUNDS):
        found = {name for name, value in _assignments(tree) if _is_rank(value, known)} - known
        if not found:
            break
        known |= found
    return frozenset(known)


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from _paired(target, node.value)


def _paired(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """`r, w = get_rank(), get_world_size()` gives each name its own value."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
        for one, its_value in zip(target.elts, value.elts, strict=False):
            yield from _paired(one, its_value)


def _is_rank(value: ast.expr, known: set[str]) -> bool:
    if isinstance(value, ast.Name):
        return value.id in known or bool(_WORDS.search(value.id))
    if isinstance(value, ast.Attribute):
        return bool(_WORDS.search(value.attr))
    if isinstance(value, ast.Subscript):
        return "environ" in ast.unparse(value.value) and bool(_WORDS.search(ast.unparse(value.slice)))
    if isinstance(value, ast.Call):
        called = ast.unparse(value.func)
        if called in _CONVERSIONS:
            return len(value.args) == 1 and _is_rank(value.args[0], known)
        if called.endswith(("environ.get", "getenv")):
            return bool(value.args) and bool(_WORDS.search(ast.unparse(value.args[0])))
        return bool(_WORDS.search(called.rpartition(".")[2]))
    if isinstance(value, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.IfExp)):
        parts = [node for node in ast.iter_child_nodes(value) if isinstance(node, ast.expr)]
        asked = [part for part in parts if not isinstance(part, (ast.Constant, ast.Tuple, ast.List))]
        return bool(asked) and all(_is_rank(part, known) for part in asked)
    return False


def _first_parameters_of_rank_functions(tree: ast.Module) -> Iterator[str]:
    """`mp.spawn(work, nprocs=4)` calls work(rank, …)."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    started = {
        given.id
        for call in calls
        if ast.unparse(call.func).rpartition(".")[2] in _STARTERS
        for given in (*call.args[:1], *(word.value for word in call.keywords if word.arg == "fn"))
        if isinstance(given, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in started and node.args.args:
            yield node.args.args[0].arg
