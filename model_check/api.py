"""What `import model_check` offers to a script, a notebook or a cluster's own wrapper; `cli` is built on it too.

Prints nothing. May import any room but `cli`. Each function imports what it needs when it is called: `observe` runs in
a user's training process, with the base install alone and before torch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from model_check.errors import RunDirError, UsageError
from model_check.record import RunDir, Verdict
from model_check.record.paths import RUN_DIR_VARIABLE

if TYPE_CHECKING:
    from model_check.supervise.supervisor import Limits, Supervisor


def observe(run_dir: Path | str | None = None) -> Path:
    """Starts recording in this process: black box and numerics guard. Returns the run directory.

    For jobs that our launcher cannot start: Ray, notebooks, a cluster's own wrapper. Call it in every rank, at the top
    of the script or of the function that a worker runs, before the model is made. All ranks name the same directory,
    here or in MODEL_CHECK_RUN_DIR. MODEL_CHECK_GUARD sets the guard: observe (default), full, halt or off. Under
    `model-check run` this call changes nothing. The verdict comes from `model-check diagnose RUN_DIR`.
    """
    from model_check.blackbox.box import BOX
    from model_check.numerics.bootstrap import follow

    given = run_dir or os.environ.get(RUN_DIR_VARIABLE)
    if BOX.run_dir is not None:
        launched = os.environ.get(RUN_DIR_VARIABLE) == str(BOX.run_dir.root)
        if given and not launched and Path(given).resolve() != BOX.run_dir.root:
            raise UsageError(
                f"this process already records into {BOX.run_dir.root}, so it cannot record into {given}",
                remedy="call observe once in a process, or start a new process",
            )
        return BOX.run_dir.root
    if not given:
        raise UsageError(
            f"observe has no run directory: run_dir is not given and {RUN_DIR_VARIABLE} is not set",
            remedy='name a directory that all ranks share: model_check.observe(run_dir="runs/1")',
        )
    _set_guard()
    directory = RunDir.create(given, resuming=True)  # another rank may have made it a moment ago
    try:
        follow(directory.root)
    except OSError as error:  # a full disk is our trouble, as under `model-check run`
        warnings.warn(f"this process is not recorded ({error})", stacklevel=2)
    return directory.root


def _set_guard() -> None:
    from model_check.blackbox.box import GUARD_VARIABLE, GuardMode

    mode = os.environ.setdefault(GUARD_VARIABLE, "observe")
    if mode not in get_args(GuardMode):
        raise UsageError(f"{GUARD_VARIABLE}={mode} is not a mode", remedy="use observe, full, halt or off")


def diagnose(run_dir: Path | str) -> Verdict:
    """The verdict on a run that is over or still going on, from its run directory. Writes no verdict.json.

    If the ranks are alive on this host and no launcher of ours watches them, their stacks are taken first.
    """
    from model_check.blackbox.service import request
    from model_check.diagnose import examine
    from model_check.supervise.run_liveness import watch_of
    from model_check.supervise.unwatched import look_at_ranks

    directory = RunDir.open(run_dir)
    if not (directory.blackbox_dir.is_dir() or directory.events_dir.is_dir()):
        raise RunDirError(
            f"{run_dir} is not a run directory: it has neither blackbox/ nor events/",
            remedy="pass the folder that the run printed",
        )
    watch = watch_of(directory)
    live = watch.alive if watch is not None else look_at_ranks(directory, request)
    return examine(directory, live=live)


def supervisor_for(
    directory: RunDir,
    limits: Limits,
    *,
    say: Callable[[str], None],
    show: Callable[[Verdict], None],
    fall_silent: Callable[[], None],
) -> Supervisor:
    """A supervisor whose findings come from the rules of `diagnose`. It reports through the three callbacks."""
    from model_check.blackbox.service import request
    from model_check.diagnose import Examiner
    from model_check.supervise.supervisor import Supervisor

    examiner = Examiner(directory)
    return Supervisor(
        directory,
        examine=lambda _, live: examiner.update(live=live),
        say=say,
        show=show,
        fall_silent=fall_silent,
        request_flight=request,
        limits=limits,
    )
