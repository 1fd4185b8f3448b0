"""A package that cannot be imported, in one sentence: which one, what it says, where it lies. Standard library only."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType

from model_check.errors import LaunchError

_OURS = "model_check"
_MACHINERY = ("importlib", "_frozen_importlib", "_frozen_importlib_external", "runpy", "__main__", _OURS)
_LONGEST = 300
# Modules whose distribution has a different name.
_DISTRIBUTIONS = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py"}
_EXTRA = re.compile(r"""^(?P<name>[\w.-]+).*;\s*extra\s*==\s*["'](?P<extra>\w+)["']""")


def broken_package(error: BaseException) -> LaunchError | None:
    """The package whose import raised this, whatever it raised; None where no import of another package did."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and "." not in missing and missing != _OURS:
        return LaunchError(f"the package {missing} is not installed", remedy=_how_to_install(missing))
    name = _first_foreign_module(error.__traceback__)
    if name is None and isinstance(error, SyntaxError):
        name = _module_unread(error)  # what cannot be read has not begun to run
    if name is None and isinstance(error, ImportError):
        name = _top(error.name or "")  # a library in machine code has no frame of its own
    if not name or name == _OURS:
        return None
    said = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
    remedy = f"move that file away if it is not the real {name}, else pip install --force-reinstall {_brought_by(name)}"
    return LaunchError(f"the package {name} cannot be imported: {said} ({_place(error)})", remedy=remedy)


def _how_to_install(module: str) -> str:
    """Which of our extras installs the package, if one does."""
    wanted = _DISTRIBUTIONS.get(module, module).replace("_", "-").lower()
    try:
        requirements = importlib.metadata.requires("model-check") or []
    except importlib.metadata.PackageNotFoundError:  # a clone that is not installed
        requirements = []
    for match in filter(None, map(_EXTRA.match, requirements)):
        if match["name"].replace("_", "-").lower() == wanted:
            return f'pip install "model-check[{match["extra"]}]" brings it, and so does bash run.sh in a clone'
    return "bash run.sh installs what is needed"


def _place(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _module_unread(error: SyntaxError) -> str | None:
    """The top package of a file that an import could not read; None where something else than an import read it."""
    reader = traceback.extract_tb(error.__traceback__)[-1]  # the import machinery takes its own frames away
    if not error.filename or not (reader.line or "").startswith(("import ", "from ", "return _bootstrap._gcd_import")):
        return None
    file = Path(error.filename)
    roots = [root for folder in sys.path if file.is_relative_to(root := Path(folder).absolute())]
    nearest = max(roots, key=lambda root: len(root.parts), default=None)
    return file.relative_to(nearest).parts[0].removesuffix(".py") if nearest is not None else None


def _first_foreign_module(trace: TracebackType | None) -> str | None:
    """What our own code imported: a package that this one needs may be the one at fault, and its line is shown.

    Only code that runs while a module is imported counts: functions on the way, such as the parser's, do not.
    """
    while trace is not None:
        module = _top(str(trace.tb_frame.f_globals.get("__name__", "")))
        if trace.tb_frame.f_code.co_name == "<module>" and module not in _MACHINERY:
            return module
        trace = trace.tb_next
    return None


def _brought_by(module: str) -> str:
    return importlib.metadata.packages_distributions().get(module, [module])[0]


def _top(module: str) -> str:
    return module.partition(".")[0]
