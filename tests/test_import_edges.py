"""The house of the design: which room may import which, and how long a function may be. An exception is a decision."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "model_check"

# Exactly what is used: an edge that nothing needs any more goes. Every room may import `errors`.
EDGES: dict[str, set[str]] = {
    "errors": set(),
    "record": set(),
    "config": set(),
    "plan": {"config"},
    "blackbox": {"record"},
    "numerics": {"record", "blackbox"},
    "supervise": {"record"},
    "launch": {"record", "blackbox", "supervise"},
    "diagnose": {"record"},
    "data": {"config"},
    "models": {"config"},
    "checkpoint": {"config", "record"},
    "engine": {"data", "models", "checkpoint", "numerics", "blackbox", "plan", "config", "record"},
    "doctor": {"config", "record", "launch", "supervise", "data"},
}
# May import any room, and no room imports them: cli imports api, never the reverse.
ANY_ROOM = {"api", "cli", "__init__", "__main__"}
LONGEST_FUNCTION = 60  # lines, from `def` to the end
MAY_BE_LONGER = {
    # The hot path of the black box: two closures over one set of cells. A shared factory would cost each record a call.
    "blackbox/recorder.py:_make_puts",
    # The flags of a verb are the parameters of its function, with their help beside them.
    "cli/run.py:run",
}
WITHOUT_TORCH = ("record", "config", "plan", "supervise", "diagnose")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [node.module] if node.module != "model_check" else [f"model_check.{a.name}" for a in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("model_check.")}
    return rooms


def test_every_room_is_in_the_plan_of_the_house() -> None:
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")} - ANY_ROOM
    assert rooms <= set(EDGES), f"rooms without edges: {rooms - set(EDGES)}"


def test_rooms_import_along_their_edges_and_no_edge_is_unused() -> None:
    found: dict[str, set[str]] = {room: set() for room in EDGES}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(path)
        if room not in ANY_ROOM:
            rooms = imported_rooms(path) - {room, "errors"}
            assert rooms <= EDGES[room], f"{path.relative_to(PACKAGE)} imports {sorted(rooms - EDGES[room])}"
            found[room] |= rooms
    assert found == EDGES


def test_no_function_is_too_long_to_read() -> None:
    too_long = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            if is_function and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION:
                too_long.add(f"{path.relative_to(PACKAGE).as_posix()}:{node.name}")
    assert too_long == MAY_BE_LONGER


def test_api_does_not_import_the_command_line() -> None:
    assert "cli" not in imported_rooms(PACKAGE / "api.py")
    assert any("api" in imported_rooms(path) for path in (PACKAGE / "cli").glob("*.py"))


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_rooms_without_torch_stay_without_it(room: str) -> None:
    modules = [
        f"model_check.{'.'.join(p.relative_to(PACKAGE).with_suffix('').parts)}".removesuffix(".__init__")
        for p in sorted((PACKAGE / room).rglob("*.py"))
    ]
    program = (
        f"import sys, importlib\nfor m in {modules!r}: importlib.import_module(m)\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
