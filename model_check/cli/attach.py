"""`model-check attach`: who waits for whom in a job that hangs right now and was started without us."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from model_check.cli.options import AsJson
from model_check.errors import UsageError
from model_check.record import RunDir
from model_check.supervise.attach import JobPicture, describe, look_at
from model_check.supervise.job_finder import FoundJob, find_jobs, jobs_of


def attach(
    pids: Annotated[
        list[int] | None, typer.Argument(help="The launcher, or the ranks. None: every job found on this host.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Keep the stacks and samples in a run directory.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take the stacks of a hanging job's ranks from outside, merge them by position, and say who is missing where.

    Nothing is stopped, signalled or injected. The job needs no preparation.

    Example: model-check attach 4711
    """
    jobs = jobs_of(pids) if pids else find_jobs()
    if not jobs:
        raise UsageError(
            "no process of this host has RANK and WORLD_SIZE in its environment",
            remedy="give the pid of the launcher: model-check attach PID",
        )
    directory = _run_directory(run_dir, jobs)
    pictures = [look_at(job, run_dir=directory) for job in jobs]
    if as_json:
        typer.echo(json.dumps([picture.to_json() for picture in pictures], indent=2))
        return
    for picture in pictures:
        typer.echo(describe(picture))
        _mention_refusals(picture)
        _mention_black_box(picture)
    if directory is not None:
        typer.echo(f"stacks and samples: {directory.root}")


def _run_directory(path: Path | None, jobs: list[FoundJob]) -> RunDir | None:
    if path is None:
        return None
    if len(jobs) > 1:
        raise UsageError(
            f"--run-dir holds one job and {len(jobs)} were found ({', '.join(job.name for job in jobs)})",
            remedy="give the pid of the one you mean",
        )
    return RunDir.create(path)


def _mention_refusals(picture: JobPicture) -> None:
    refused = [rank.pid for rank in picture.ranks if rank.kind == "unreadable"]
    if refused and os.geteuid() != 0:
        pids = " ".join(map(str, refused))
        typer.echo(f"  the kernel lets only root read some of these stacks: sudo model-check attach {pids}")


def _mention_black_box(picture: JobPicture) -> None:
    known = {rank.run_dir for rank in picture.job.ranks if rank.run_dir}
    for run_dir in sorted(known):
        typer.echo(f"  this job has a black box: model-check diagnose {run_dir}")
