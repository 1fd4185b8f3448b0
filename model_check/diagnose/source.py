"""The user's source files, where they can be read here: single statements, loops around a line, lines with context."""

from __future__ import annotations

import ast
import linecache
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from model_check.record.redaction import redact_text

if TYPE_CHECKING:
    from model_check.record.stacks import Frame

_MAX_SOURCE_LINES = 20_000
_MAX_SOURCE_BYTES = 4 << 20
_ENDLESS = ("count", "cycle", "repeat", "iter")
_COMMENT = re.compile(r"\s*#[^'\"]*$")


@lru_cache(maxsize=256)
def source_lines(file: str, root: str = "") -> tuple[str, ...]:
    """The lines of a file; a relative path is looked up under the folder that the process ran in, then under ours."""
    for path in (Path(root, file), Path(file)) if root else (Path(file),):
        # The name comes from a file that anybody may have written: a pipe would be waited for.
        lines = linecache.getlines(str(path)) if _is_source(path) else []
        if lines and len(lines) <= _MAX_SOURCE_LINES:
            return tuple(line.rstrip("\n") for line in lines)
    return ()


def _is_source(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size <= _MAX_SOURCE_BYTES
    except (OSError, ValueError):
        return False


def source_text(frame: Frame) -> str:
    """The source line of a frame: from the evidence, else from the file where it can be read here."""
    if frame.text:
        return frame.text.strip()
    lines = source_lines(frame.file, frame.root)
    return redact_text(lines[frame.line - 1].strip()) if 1 <= frame.line <= len(lines) else ""


def statement(frame: Frame) -> str:
    """The call on a frame's line without its comment; empty where the line does not hold all of it."""
    text = _COMMENT.sub("", source_text(frame))
    return text if "(" in text and text.count("(") == text.count(")") else ""


class Loop(NamedTuple):
    """A loop statement. `ends`: it iterates over something finite, and has no other way out."""

    first: int
    last: int
    ends: bool


@lru_cache(maxsize=64)
def _loops(file: str, root: str) -> tuple[Loop, ...]:
    try:
        tree = ast.parse("\n".join(source_lines(file, root)))
    except (SyntaxError, ValueError):
        return ()
    found = [node for node in ast.walk(tree) if isinstance(node, (ast.While, ast.For, ast.AsyncFor))]
    return tuple(Loop(node.lineno, node.end_lineno or node.lineno, _ends(node)) for node in found)


def _ends(loop: ast.While | ast.For | ast.AsyncFor) -> bool:
    """A `for` that may leave early is often a retry loop: like a `while`, it may only be waiting."""
    if not isinstance(loop, ast.For) or any(isinstance(node, (ast.Break, ast.Return)) for node in ast.walk(loop)):
        return False
    made_by = loop.iter.func if isinstance(loop.iter, ast.Call) else None
    name = made_by.attr if isinstance(made_by, ast.Attribute) else made_by.id if isinstance(made_by, ast.Name) else ""
    return name not in _ENDLESS


def enclosing_loop(frame: Frame, *lines: int) -> Loop | None:
    """The innermost loop statement around a frame's line, and around these lines as well."""
    return next(iter(loops_at(frame, frame.line, *lines)), None)


def loops_at(frame: Frame, *lines: int) -> list[Loop]:
    """The loop statements of a frame's file around all of these lines, innermost first."""
    around = [loop for loop in _loops(frame.file, frame.root) if all(loop.first <= n <= loop.last for n in lines)]
    return sorted(around, key=lambda loop: -loop.first)


def lines_around(file: str, line: int, context: int = 2, root: str = "") -> list[tuple[int, str]]:
    """Numbered source lines around a line, without secrets; empty where the file cannot be read."""
    lines = source_lines(file, root)
    if not 1 <= line <= len(lines):
        return []
    first, last = max(1, line - context), min(len(lines), line + context)
    return [(number, redact_text(lines[number - 1])) for number in range(first, last + 1)]
