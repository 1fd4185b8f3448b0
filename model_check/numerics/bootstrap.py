"""Brings the black box and the numerics guard into a process of somebody else's script. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from model_check.blackbox.box import FOLLOWER, GUARD_VARIABLE
from model_check.blackbox.install import install


def inject_path() -> str:
    """The folder to put in front of PYTHONPATH: its sitecustomize calls `follow` in every child that runs Python."""
    return str(Path(__file__).resolve().parent / "inject")


def follow(run_dir: Path | str, rank: int | None = None, **identity: Any) -> None:
    """Records this process, and checks its numbers unless the guard is off."""
    if os.environ.get(GUARD_VARIABLE, "off") != "off":
        FOLLOWER.module = "model_check.numerics.step_watchers"
    install(run_dir, rank, **identity)
