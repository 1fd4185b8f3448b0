"""The house of the design: which room may import which. A new edge is a decision, made here."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "model_check"

EDGES: dict[str, set[str]] = {
    "errors": set(),
    "config": set(),
    "rundir": set(),
    "plan": {"config"},
    "observe": {"rundir"},
    "launch": {"config", "rundir", "observe"},
    "data": {"config", "observe"},
    "models": {"config"},
    "checkpoint": {"config", "rundir", "observe"},
    "engine": {"data", "models", "checkpoint", "observe", "plan", "config", "rundir"},
    "diagnose": {"rundir"},
    "doctor": {"config", "launch", "observe", "rundir", "data"},
    "dashboard": {"rundir", "diagnose"},
}
ANY_ROOM = {"cli", "__init__", "__main__"}
WITHOUT_TORCH = ("config", "rundir", "plan", "diagnose")


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


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_stay_within_the_edges(path: Path) -> None:
    room = room_of(path)
    if room in ANY_ROOM:
        return
    allowed = EDGES[room] | {room, "errors"}
    extra = imported_rooms(path) - allowed
    assert not extra, f"{path.relative_to(PACKAGE)} imports {sorted(extra)}; {room} may import {sorted(allowed)}"


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
