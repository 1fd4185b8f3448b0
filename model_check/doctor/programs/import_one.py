"""Imports the module named on the command line; says how long it took and how much memory it brought.

    python import_one.py transformers

Standard library only, so that everything that is counted belongs to the module.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def import_one(name: str) -> dict[str, Any]:
    """Whatever the module raises, and be it SystemExit, is the answer."""
    before, started = resident_bytes(), time.perf_counter()
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        missing = isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]
        text = " ".join(str(error).split())
        return {
            "error": f"{type(error).__name__}: {text}",
            "line": f"{frame.filename}:{frame.lineno}",
            "missing": missing,
        }
    return {
        "seconds": time.perf_counter() - started,
        "bytes": resident_bytes() - before,
        "file": getattr(module, "__file__", None),
    }


if __name__ == "__main__":
    # A module that prints while it is imported must not be taken for the answer.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    line = json.dumps(import_one(sys.argv[1])) + "\n"
    os.write(answer_to, line.encode())
    os._exit(0)  # exit handlers of half-imported packages are not our subject
