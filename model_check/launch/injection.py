"""The variables that put the black box into every Python process below us."""

from __future__ import annotations

import os
from collections.abc import Mapping

from model_check.blackbox.box import GUARD_VARIABLE, RANK_PID_VARIABLE, GuardMode
from model_check.blackbox.gate import FOLDER_VARIABLE, LINES_VARIABLE, SLOTS_VARIABLE
from model_check.record import RunDir
from model_check.record.paths import RUN_DIR_VARIABLE


def injected_environment(
    run_dir: RunDir, environ: Mapping[str, str], bootstrap: str, guard: GuardMode = "observe"
) -> dict[str, str]:
    """Names the run directory and the guard, and puts the bootstrap's folder in front of the user's PYTHONPATH.

    `guard`: whether a step with numbers that are not finite is reported, refused, or not looked for.
    """
    path = environ.get("PYTHONPATH")
    return {
        RUN_DIR_VARIABLE: str(run_dir.root),
        GUARD_VARIABLE: guard,
        "PYTHONPATH": os.pathsep.join([bootstrap, *([path] if path else [])]),
    }


def forget_outer_job() -> None:
    """A job that a rank starts, or a notebook that trained before, is a job of its own.

    With the outer rank's mark in their environment its ranks would take themselves for helpers of that rank: no black
    box, no gate. How long to wait at a gate is the user's word and stays.
    """
    for name in (RANK_PID_VARIABLE, FOLDER_VARIABLE, SLOTS_VARIABLE, LINES_VARIABLE):
        os.environ.pop(name, None)
