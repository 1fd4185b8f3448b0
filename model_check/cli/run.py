"""`model-check run`: any PyTorch script, or a job that brings its own launcher, under the black box."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from model_check.blackbox.box import GuardMode
from model_check.cli.options import RunDirMode
from model_check.errors import UsageError
from model_check.launch.foreign import ForeignScript
from model_check.launch.limits import use_less_memory
from model_check.record import RunDir, Verdict, write_json_atomic
from model_check.record.claim import Claim, Job, enter
from model_check.record.paths import read_mode
from model_check.record.verdict import Outcome
from model_check.supervise.supervisor import Limits, Supervisor

_LAUNCHERS = frozenset({"torchrun", "accelerate", "accelerate-launch", "deepspeed", "mpirun", "mpiexec", "srun"})
Start = Literal["cold", "gate"]
Enter = Callable[[Job], tuple[RunDir, Claim]]  # `enter` with the run directory's flags filled in
_OWN_LAUNCHER_S = 10.0  # what torchrun and its like get to end a crashed job in their own way


def run(
    context: typer.Context,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "--nproc-per-node", help="Ranks to start on this machine (default 1).")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Where the evidence and the verdict go (default .outputs/<run-id>)."),
    ] = None,
    run_dir_mode: RunDirMode = "0700",
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module name, as in python -m.")] = False,
    hang_kill_after_s: Annotated[
        float, typer.Option("--hang-kill-after-s", min=0.0, help="End an idle hang after this long; 0: only on proof.")
    ] = Limits.kill_after_s,
    io_kill_after_s: Annotated[
        float,
        typer.Option("--io-kill-after-s", min=0.0, help="End uninterruptible I/O (state D) after this long; 0: never."),
    ] = Limits.io_kill_after_s,
    stop_grace: Annotated[
        float,
        typer.Option("--stop-grace", min=0.0, help="Seconds from SIGINT or SIGTERM, which are passed on, to SIGKILL."),
    ] = 30.0,
    guard: Annotated[
        str,
        typer.Option("--guard", help="NaN, infinity: observe (report), full (in all gradients), halt (refuse), off."),
    ] = "observe",
    start: Annotated[
        str, typer.Option("--start", help="cold: all ranks at once; gate: as many import at once as there is room for.")
    ] = "cold",
    low_memory: Annotated[
        bool, typer.Option("--low-memory", help="Small communication buffers and a frugal allocator.")
    ] = False,
    memory_limit_gb: Annotated[
        float | None, typer.Option("--memory-limit-gb", min=2.0, help="Host memory per rank; more ends it by name.")
    ] = None,
) -> int:
    """Run SCRIPT ARGS… on N ranks as torchrun would, and name every hang and crash: rank, line, cause, fix.

    With `--` in front, run a COMMAND that starts its ranks itself (torchrun, accelerate launch, mp.spawn).

    Exit code: what the ranks returned (128 + the signal of a killed one) or COMMAND did; 1 where a hang was ended.

    Examples:

      model-check run --nproc 2 train.py --its --own args

      model-check run -- torchrun --nproc-per-node 2 train.py
    """
    words = list(context.args)
    if not words:
        raise UsageError("run needs a script", remedy="model-check run --nproc 2 train.py, or run -- COMMAND")
    own_launcher = _after_double_dash(words)
    if own_launcher:
        _refuse_flags_of_a_script(ranks=nproc is not None or module, memory_limit=memory_limit_gb is not None)
    if nproc is not None and nproc < 1:
        raise UsageError(f"--nproc {nproc} starts no rank", remedy="give the number of ranks, e.g. --nproc 2")
    if memory_limit_gb == math.inf:
        raise UsageError("--memory-limit-gb inf is no limit", remedy="leave the flag out")
    mode: GuardMode = _one_of("--guard", GuardMode, guard)
    way: Start = _one_of("--start", Start, start)
    if low_memory:
        use_less_memory()
    enter_dir = partial(enter, run_dir, mode=read_mode(run_dir_mode))
    limits = Limits(kill_after_s=hang_kill_after_s, io_kill_after_s=io_kill_after_s)
    if own_launcher:
        return _run_command(words, enter_dir, limits, stop_grace, mode, gated=way == "gate")
    if not module:
        _refuse_a_launcher(words)
    script = ForeignScript(words[0], tuple(words[1:]), module)
    return _run_script(script, nproc or 1, enter_dir, limits, stop_grace, mode, way, memory_limit_gb)


def _refuse_flags_of_a_script(*, ranks: bool, memory_limit: bool) -> None:
    if ranks:
        raise UsageError(
            "--nproc and -m cannot be combined with a command after --, which starts its own ranks",
            remedy="give the number of ranks to that command",
        )
    if memory_limit:
        raise UsageError(
            "--memory-limit-gb cannot be combined with a command after --, which starts its own ranks",
            remedy="run the script itself: model-check run --nproc 2 train.py",
        )


def _after_double_dash(words: list[str]) -> bool:
    """The parser swallows the `--`; as typed it stands right before the first word that is not ours."""
    typed = sys.argv[1:]
    return len(typed) > len(words) and typed[-len(words) - 1] == "--"


def _one_of(flag: str, choices: Any, said: str) -> Any:
    """The word that was typed, as one of the type's."""
    *most, last = get_args(choices)
    if said not in (*most, last):
        raise UsageError(f"{flag} does not know the value {said}", remedy=f"use {', '.join(most)} or {last}")
    return said


@contextlib.contextmanager
def _watched(enter_dir: Enter, limits: Limits) -> Iterator[tuple[RunDir, Supervisor]]:
    """The run directory, claimed and with the environment in it, and its supervisor."""
    from model_check.cli.supervision import supervisor_for
    from model_check.record.environment import snapshot_environment

    directory, claim = enter_dir(Job.alone())
    with claim:
        write_json_atomic(directory.environment, snapshot_environment())
        yield directory, supervisor_for(directory, limits)


def _run_script(
    script: ForeignScript,
    nproc: int,
    enter_dir: Enter,
    limits: Limits,
    stop_grace_s: float,
    guard: GuardMode,
    start: Start,
    memory_limit_gb: float | None,
) -> int:
    from model_check.launch.foreign import run_script
    from model_check.numerics.bootstrap import inject_path

    script.check()
    with _watched(enter_dir, limits) as (directory, supervisor):
        result = run_script(
            script,
            nproc=nproc,
            run_dir=directory,
            supervisor=supervisor,
            bootstrap=inject_path(),
            guard=guard,
            start=start,
            memory_limit_gb=memory_limit_gb,
            stop_grace_s=stop_grace_s,
        )
        if result.outcome == "interrupted":
            supervisor.note_stop("interrupted", f"interrupted: {result.message}")
        return _show_end(supervisor.finish(result.outcome, result.exits, result.exit_code), supervisor, directory)


def _refuse_a_launcher(words: list[str]) -> None:
    """A launcher without the `--` would be started once for each rank, and start ranks of its own each time."""
    name = Path(words[0]).name
    if name in _LAUNCHERS or (not Path(words[0]).is_file() and shutil.which(words[0])):
        raise UsageError(
            f"{name} is a command, not a Python script", remedy=f"write -- in front of it: model-check run -- {name} …"
        )


def _run_command(
    words: list[str], enter_dir: Enter, limits: Limits, stop_grace_s: float, guard: GuardMode, *, gated: bool
) -> int:
    from model_check.launch.command import run_command
    from model_check.launch.foreign import injected_environment
    from model_check.launch.gate import plan_gate
    from model_check.numerics.bootstrap import inject_path

    if shutil.which(words[0]) is None:
        if Path(words[0]).is_file():
            raise UsageError(
                f"{words[0]} is not executable", remedy=f"name its interpreter: model-check run -- python {words[0]} …"
            )
        raise UsageError(f"there is no command {words[0]}", remedy="check the command after --")
    with _watched(enter_dir, replace(limits, own_launcher_s=_OWN_LAUNCHER_S)) as (directory, supervisor):
        env = injected_environment(directory, os.environ, inject_path(), guard)
        if gated:
            # Only the command knows how many ranks it starts, so the gate admits as many as the host can hold.
            env |= plan_gate(directory, os.cpu_count() or 1).variables()
        result = run_command(words, run_dir=directory, env=env, supervisor=supervisor, stop_grace_s=stop_grace_s)
        outcome: Outcome = "completed" if result.exit_code == 0 else "failed"
        if result.interrupted:
            outcome = "interrupted"
            supervisor.note_stop("interrupted", "interrupted by a signal")
        return _show_end(supervisor.finish(outcome, None, result.exit_code), supervisor, directory)


def _show_end(verdict: Verdict, supervisor: Supervisor, directory: RunDir) -> int:
    from model_check.cli.supervision import short, show_findings

    code = f" with exit code {verdict.exit_code}" if verdict.exit_code else ""
    show_findings(verdict, supervisor, f"{verdict.outcome}{code}; run directory: {short(directory.root)}")
    return verdict.exit_code or 0
