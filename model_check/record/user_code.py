"""Whose code a file is: the user's, a library's, the compiler's, or ours.

One rule for live frames, for stacks taken from outside, and for records of another machine.
"""

from __future__ import annotations

import re
import sysconfig
from functools import lru_cache
from pathlib import Path

# Inductor names a file after its content, in a folder named after the first letters, wherever its cache is.
_GENERATED = re.compile(r"^<|/torchinductor_[^/]*/|/[a-z2-7]{2}/c[a-z2-7]{40,}\.py$|/\.triton/|/torch_extensions/")
# A record may come from another machine, so the paths of this interpreter alone do not decide.
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python3\.\d+/|frozen importlib|/torch/(?:distributed|utils|nn|_dynamo)/"
)
_STDLIB = tuple(
    path.rstrip("/") + "/" for key in ("stdlib", "platstdlib") if (path := sysconfig.get_paths().get(key)) is not None
)
# The last two are the names of these rooms in the records of earlier versions.
_WATCHING_ROOMS = ("record/", "blackbox/", "numerics/", "supervise/", "launch/", "observe/", "rundir/")
_DOORS = ("cli/", "engine/rank.py")
_PACKAGE = Path(__file__).resolve().parent.parent


def is_user_file(path: str) -> bool:
    """Not the standard library, an installed package or its command, generated code, or ourselves."""
    path = path.replace("\\", "/")
    if not path or is_generated(path) or _LIBRARY.search(path) or path.startswith(_STDLIB):
        return False
    return not is_ours(path) and not _is_console_script(path)


def is_generated(path: str) -> bool:
    """`<string>`, `<eval_with_key>.3`, a kernel of Inductor or Triton: no line for a user to look at."""
    return _GENERATED.search(path) is not None


def is_ours(path: str) -> bool:
    """A file of this package, wherever its copy lies. A user's project may well be in a folder of the same name."""
    inside = _inside_package(path)
    return inside.startswith((*_WATCHING_ROOMS, *_DOORS)) or inside in _our_files()


def is_watching(path: str) -> bool:
    """Whether a file is ours and only watches, so that it is never the program itself."""
    return _inside_package(path).startswith(_WATCHING_ROOMS)


def is_trainer(path: str) -> bool:
    """Whether a file is ours and belongs to the program itself when our trainer runs."""
    inside = _inside_package(path)
    return bool(inside) and not inside.startswith(_WATCHING_ROOMS)


def is_door(path: str) -> bool:
    """Whether a run of our trainer begins in this file, so that its callers do not matter."""
    return _inside_package(path).startswith(_DOORS)


def _inside_package(path: str) -> str:
    """A checkout of that name may hold the environment: the packages in it are libraries."""
    _, found, inside = f"/{path}".replace("\\", "/").rpartition("/model_check/")
    return inside if found and not _LIBRARY.search(f"/{inside}") else ""


@lru_cache(maxsize=1)
def _our_files() -> frozenset[str]:
    return frozenset(file.relative_to(_PACKAGE).as_posix() for file in _PACKAGE.rglob("*.py"))


@lru_cache(maxsize=1024)
def _is_console_script(path: str) -> bool:
    """Whether pip wrote this script beside the interpreter for a package's command (torchrun, model-check)."""
    file = Path(path)
    return not file.suffix and file.parent.name in ("bin", "Scripts") and (file.parent / "python3").exists()
