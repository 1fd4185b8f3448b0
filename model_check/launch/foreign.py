"""Runs somebody else's script on N ranks as torchrun would, with the black box injected and the supervisor watching.

The ranks see torchrun's environment, inherit standard input, and keep all GPUs visible: such scripts call
`set_device(LOCAL_RANK)`. Two variables are added: where the run directory is, and our folder in front of PYTHONPATH.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model_check.blackbox.box import GUARD_VARIABLE, GuardMode
from model_check.errors import UsageError
from model_check.launch.gpus import list_gpus
from model_check.launch.job import JobResult, launch_job
from model_check.launch.programs import Command
from model_check.record import RunDir
from model_check.record.paths import RUN_DIR_VARIABLE
from model_check.supervise.hooks import Graces
from model_check.supervise.supervisor import Supervisor


@dataclass(frozen=True)
class ForeignScript:
    """What the user wants run: a file, or with `module` the name that `python -m` takes."""

    target: str
    args: tuple[str, ...] = ()
    module: bool = False

    def argv(self) -> tuple[str, ...]:
        # Unbuffered as under torchrun: a killed rank must not take its last lines with it.
        how = ("-u", "-m") if self.module else ("-u",)
        return (os.environ.get("PYTHON_EXEC", sys.executable), *how, self.target, *self.args)

    def check(self) -> None:
        if self.module and not _can_be_found(self.target):
            raise UsageError(
                f"there is no module {self.target}",
                remedy="run it from the folder that holds it, or install its package",
            )
        if not self.module and not Path(self.target).is_file():
            raise UsageError(
                f"there is no script {self.target}",
                remedy="give the path of a Python file, or -m and the name of a module",
            )


def _can_be_found(module: str) -> bool:
    """Whether the first part of the name is somewhere; the rest cannot be known without running the package's code."""
    first = module.partition(".")[0]
    if "PYTHON_EXEC" in os.environ or first in sys.modules:
        return True  # another interpreter has other modules
    here = importlib.machinery.PathFinder.find_spec(first, [str(Path.cwd())])
    return first != "" and (here or importlib.util.find_spec(first)) is not None


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


def run_script(
    script: ForeignScript,
    *,
    nproc: int,
    run_dir: RunDir,
    supervisor: Supervisor,
    bootstrap: str,
    guard: GuardMode = "observe",
    start: Literal["cold", "gate"] = "cold",
    memory_limit_gb: float | None = None,
    stop_grace_s: float = 30.0,
) -> JobResult:
    """Runs the script on `nproc` ranks and returns when all are gone; the verdict is the supervisor's.

    `bootstrap`: the folder whose sitecustomize brings the black box into the ranks.
    `stop_grace_s`: seconds between a request to stop and SIGKILL.
    """
    script.check()
    env = injected_environment(run_dir, os.environ, bootstrap, guard)
    if nproc > 1 and "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = "1"  # torchrun's choice, so that results do not change
    stdin = os.dup(0)
    try:
        return launch_job(
            Command(script.argv(), stdin),
            nproc=nproc,
            run_dir=run_dir,
            gpus=list_gpus(),
            isolate_gpus=False,
            start=start,
            memory_limit_gb=memory_limit_gb,
            # A rank that does not catch Ctrl-C fails at once; another may still be saving.
            graces=Graces(stop_s=stop_grace_s, lost_s=stop_grace_s, busy_s=stop_grace_s),
            hooks=supervisor.hooks(),
            env=env,
        )
    finally:
        os.close(stdin)
