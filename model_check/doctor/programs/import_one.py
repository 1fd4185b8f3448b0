"""Imports the module named on the command line; says how long it took and how much memory it brought.

    python import_one.py transformers transformers      the module, and the distribution that brings it

Standard library only, so that everything that is counted belongs to the module.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import sysconfig
import time
import traceback
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_LONGEST = 2000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def import_one(name: str, distribution: str) -> dict[str, Any]:
    """Whatever the module raises, and be it SystemExit, is the answer."""
    before, started = resident_bytes(), time.perf_counter()
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
        text = " ".join(str(error)[:_LONGEST].split())
        return {
            "error": f"{type(error).__name__}: {text}" if text else type(error).__name__,
            "line": where(error),
            "missing": missing,
            "shadows": shadowing_file(name, distribution),
        }
    return {
        "seconds": time.perf_counter() - started,
        "bytes": resident_bytes() - before,
        "file": getattr(module, "__file__", None),
        "shadows": shadowing_file(name, distribution),
    }


def where(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def shadowing_file(name: str, distribution: str) -> str | None:
    """The file that is imported in place of the installed package of that name; None where it is the installed one.

    A folder with the package's papers (a user's own site-packages, an overlay) was filled by an installer.
    """
    top = name.partition(".")[0]
    if top == "model_check":
        return None  # the doctor's own, wherever it lies
    paths = sysconfig.get_paths()
    installed = PathFinder.find_spec(top, [paths["purelib"], paths["platlib"]])
    found = PathFinder.find_spec(top)
    if installed is None or found is None or not installed.origin or not found.origin:
        return None
    root = Path(found.origin).parents[1 if found.submodule_search_locations is not None else 0]
    if found.origin == installed.origin or not Path(found.origin).exists() or was_installed(root, distribution):
        return None
    return None if Path(installed.origin).samefile(found.origin) else found.origin


def was_installed(folder: Path, distribution: str) -> bool:
    names = (info.name.partition("-")[0] for info in folder.glob("*.dist-info"))
    return any(plain(name) == plain(distribution) for name in names)


def plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    # A module that prints while it is imported must not be taken for the answer.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    line = json.dumps(import_one(*sys.argv[1:])) + "\n"
    os.write(answer_to, line.encode())
    os._exit(0)  # exit handlers of half-imported packages are not our subject
