"""`model-check diagnose`: what happened to a run, worked out again from the files it left."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from model_check import api
from model_check.cli.options import AsJson
from model_check.record import RunDir, Verdict
from model_check.record.events import read_events
from model_check.record.events.process import Picture
from model_check.record.ring import read_header
from model_check.record.start_marks import start_table

if TYPE_CHECKING:
    from model_check.supervise.run_liveness import Watch


def diagnose(
    run_dir: Annotated[
        Path, typer.Argument(help="The folder that the run printed, alive, dead, or copied from elsewhere.")
    ],
    source: Annotated[
        Path | None,
        typer.Option("--source", help="Where the script's files are, if paths in the evidence are relative."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute the verdict of a run from its directory and print it.

    Example: model-check diagnose .outputs/20260101-120000-4711
    """
    from model_check.diagnose import render
    from model_check.supervise.run_liveness import watch_of

    verdict = api.diagnose(run_dir)
    directory = RunDir.open(run_dir)
    watch = watch_of(directory)
    if as_json:
        typer.echo(json.dumps(verdict.to_json(), indent=2))
        return
    if watch is None and (seen := _seen_by_attach(directory)):
        typer.echo(seen)
        return
    typer.echo(render(verdict, color=sys.stdout.isatty(), source_root=source or _where_it_ran(directory)))
    if watch is not None and not watch.alive and _without_an_end(directory):
        typer.echo(_about_the_launcher(watch))
    for line in start_table(directory):
        typer.echo(line)
    _mention_missing_logs(directory)


def _about_the_launcher(watch: Watch) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(watch.last_time))
    if watch.elsewhere:
        return (
            f"no end is on record: its launcher was on {watch.elsewhere}, and may still be; its last record is of {at}"
        )
    return f"the launcher ended without a word (SIGKILL, out of memory, power); its last record is of {at}"


def _seen_by_attach(directory: RunDir) -> str:
    """What `attach` saw: without a black box there is no history to examine, only its two looks."""
    from model_check.diagnose.render import printable

    seen = [event for event in read_events(directory.supervisor_events) if isinstance(event, Picture)]
    return "\n".join(map(printable, seen[-1].lines)) if seen else ""


def _without_an_end(directory: RunDir) -> bool:
    written = Verdict.read(directory.verdict)
    return written is None or written.outcome == "running"


def _mention_missing_logs(directory: RunDir) -> None:
    if directory.logs.is_symlink() and not directory.logs.exists():
        typer.echo(f"the raw logs of its ranks are gone: {directory.logs.readlink()} was pruned or is on another host")


def _where_it_ran(directory: RunDir) -> str | None:
    """The folder that relative paths of the run start from, as its first rank recorded it."""
    rings = sorted(directory.blackbox_dir.glob("rank-*.ring"))
    return read_header(rings[0]).cwd or None if rings else None
