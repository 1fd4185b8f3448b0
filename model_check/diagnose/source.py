"""The user's source files, where they can be read here: loops around a line, and lines with context."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache

_MAX_SOURCE_LINES = 20_000


@lru_cache(maxsize=64)
def _loops(file: str) -> tuple[tuple[int, int], ...]:
    lines = linecache.getlines(file)
    if not lines or len(lines) > _MAX_SOURCE_LINES:
        return ()
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return ()
    found = [n for n in ast.walk(tree) if isinstance(n, (ast.While, ast.For, ast.AsyncFor))]
    return tuple((node.lineno, node.end_lineno or node.lineno) for node in found)


def enclosing_loop(file: str, line: int) -> tuple[int, int] | None:
    """The first and last line of the innermost loop statement around a line of the file."""
    around = [span for span in _loops(file) if span[0] <= line <= span[1]]
    return max(around, key=lambda span: span[0], default=None)


def lines_around(file: str, line: int, context: int = 2) -> list[tuple[int, str]]:
    """Numbered source lines around a line; empty where the file cannot be read."""
    lines = linecache.getlines(file)
    if not 1 <= line <= len(lines):
        return []
    first, last = max(1, line - context), min(len(lines), line + context)
    return [(number, lines[number - 1].rstrip("\n")) for number in range(first, last + 1)]
