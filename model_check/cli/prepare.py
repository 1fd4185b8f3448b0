"""`model-check prepare`: tokenizes once, before any rank starts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from model_check.cli.flags import configured
from model_check.config import Config
from model_check.data import PreparedData
from model_check.data import prepare as prepare_data
from model_check.engine.data_and_shape import data_spec
from model_check.record.redaction import redact_text


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar with an ETA on a terminal, a line every few seconds in a pipe."""
    if not sys.stderr.isatty():
        last = time.monotonic()

        def line(done: int, total: int | None, eta_s: float | None) -> None:
            nonlocal last
            if time.monotonic() - last > 5:
                last = time.monotonic()
                of = f" of {total:,}" if total else ""
                print(f"data: {done:,}{of} documents, {eta_s or 0:.0f} s left", flush=True)

        yield line
        return
    columns = (TextColumn("data"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("data", total=None)
        yield lambda done, total, eta_s: bar.update(task, completed=done, total=total)


def prepare_with_progress(config: Config, *, verify: bool = False) -> PreparedData:
    """Prepares the data a configuration asks for and says in one line what came of it."""
    with _progress() as progress:
        prepared = prepare_data(
            data_spec(config), progress=progress, waiting=lambda why: typer.echo(f"data: {why}"), verify=verify
        )
    for message in prepared.messages:
        typer.echo(f"data: {message}")
    how = f"prepared in {prepared.seconds:.1f} s" if prepared.built else "from the cache"
    typer.echo(f"data: {redact_text(config.data.dataset)}, {prepared.tokens:,} tokens, {how}")
    return prepared


def prepare(
    preset: Annotated[str | None, typer.Option(help="debug, production, full, stable, 14b or 32b.")] = None,
    config: Annotated[list[Path] | None, typer.Option(help="A JSON or YAML file; repeatable, later ones win.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="One value: --set data.dataset=c4.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="The same as --preset debug.")] = False,
    check: Annotated[bool, typer.Option("--verify", help="Read the whole cache and check every block.")] = False,
) -> None:
    """Tokenize and cache the data of a configuration; a second call finds it done.

    Example: model-check prepare --preset debug --verify
    """
    prepare_with_progress(configured(preset, debug, config or [], overrides or []), verify=check)
    if check:
        typer.echo("data: every block matches its checksum")
