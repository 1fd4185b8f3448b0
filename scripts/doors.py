"""Shared by the doors: finds the package and the environment it was installed into, then runs one verb."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
# Packages that every verb imports. run.sh installs them into VENV, which a fresh shell does not know about.
PACKAGES = ("torch", "typer", "pydantic", "psutil", "yaml", "rich")


def enter(verb: str, *flags: str) -> None:
    """Runs `model-check VERB FLAGS ARGV`; in .venv where this interpreter lacks the packages."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing or sys.version_info < (3, 10):
        python = VENV / "bin" / "python"
        if not python.exists() or Path(sys.prefix) == VENV:
            lacks = " and ".join(missing) or "Python 3.10"
            sys.exit(f"model-check: error: {lacks} not found; `bash run.sh --debug` installs what is missing")
        os.execv(python, [str(python), *sys.argv])
    sys.path.insert(0, str(ROOT))
    from model_check.cli.main import main

    main([verb, *flags, *_without_local_rank(sys.argv[1:])])


def _without_local_rank(arguments: list[str]) -> list[str]:
    """torch.distributed.launch passes the local rank as a flag too; LOCAL_RANK in the environment says the same."""
    return [word for word in arguments if not word.startswith(("--local-rank=", "--local_rank="))]
