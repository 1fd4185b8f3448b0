"""Shared by the doors: finds the package and the environment it was installed into, then runs one verb."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def enter(verb: str, *flags: str) -> None:
    """Runs `model-check VERB FLAGS ARGV`; in .venv where this interpreter lacks the packages."""
    sys.path.insert(0, str(ROOT))
    try:
        from model_check.cli.main import main
    except ImportError as error:
        python = ROOT / ".venv" / "bin" / "python"
        if not python.exists() or Path(sys.executable).absolute() == python:
            sys.exit(f"model-check: error: {error}; run `bash run.sh --debug` once, which installs what is missing")
        os.execv(python, [str(python), *sys.argv])
    main([verb, *flags, *sys.argv[1:]])
