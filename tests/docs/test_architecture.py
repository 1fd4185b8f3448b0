"""docs/architecture.md against the code: its table of rooms, and the files and functions of its two examples."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_import_edges import EDGES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_table_of_rooms_shows_the_edges() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|[^|]*\|([^|]*)\|[^|]*\|$", PAGE, re.M)
    shown = {room: set(imports.replace(",", " ").split()) for room, imports in rows if "any" not in imports}
    assert shown == EDGES
    assert {room for room, imports in rows if "any" in imports} == {"api", "cli"}


@cache
def functions_of(file: str) -> frozenset[str]:
    """Names of all functions of a file, after the class or function around them: `Reader.read`, `spanned.call`."""
    found = set()

    def walk(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            name = f"{inside}{child.name}" if named else ""  # type: ignore[attr-defined]
            if named:
                found.add(name)
            walk(child, f"{name}." if named else inside)

    walk(ast.parse((ROOT / "model_check" / file).read_text()), "")
    return frozenset(found)


@pytest.mark.parametrize("title", ["### One hang of a foreign script", "### One NaN of a foreign script"])
def test_an_example_names_files_and_functions_that_exist_and_counts_them(title: str) -> None:
    example = PAGE.partition(title)[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*) \| .* \|$", example, re.M)
    crossed = [(file, name) for file, names in rows for name in re.findall(r"`([\w.]+)`", names)]
    missing = [
        f"{file}: {name}"
        for file, name in crossed
        if not any(f".{known}".endswith(f".{name}") for known in functions_of(file))
    ]
    assert not missing
    assert f"{len({file for file, _ in rows})} files, {len(set(crossed))} functions" in example
