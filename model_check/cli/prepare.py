"""`model-check prepare`: tokenizes once, before any rank starts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from model_check.cli.flags import configured
from model_check.cli.options import ConfigFiles, Debug, Overrides, Preset
from model_check.config import Config
from model_check.data import PreparedData
from model_check.data import prepare as prepare_data
from model_check.engine.data_and_shape import data_spec
from model_check.record.redaction import redact_text


@contextmanager
def _progress(say: Callable[[str], None]) -> Iterator[Any]:
    """A bar with an ETA on a terminal, a line every few seconds in a pipe."""
    if not sys.stderr.isatty():
        last = time.monotonic()

        def line(done: int, total: int | None, eta_s: float | None) -> None:
            nonlocal last
            if time.monotonic() - last > 5:
                last = time.monotonic()
                of = f" of {total:,}" if total else ""
                say(f"data: {done:,}{of} documents, {eta_s or 0:.0f} s left")

        yield line
        return
    columns = (TextColumn("data"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("data", total=None)
        yield lambda done, total, eta_s: bar.update(task, completed=done, total=total)


def prepare_with_progress(
    config: Config, *, verify: bool = False, say: Callable[[str], None] = typer.echo
) -> PreparedData:
    """Prepares the data a configuration asks for and says in one line what came of it."""
    with _progress(say) as progress:
        prepared = prepare_data(
            data_spec(config), progress=progress, waiting=lambda why: say(f"data: {why}"), verify=verify
        )
    for message in prepared.messages:
        say(f"data: {message}")
    how = f"prepared in {prepared.seconds:.1f} s" if prepared.built else "from the cache"
    say(f"data: {redact_text(config.data.dataset)}, {prepared.tokens:,} tokens, {how}")
    return prepared


def prepare(
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    debug: Debug = False,
    check: Annotated[bool, typer.Option("--verify", help="Read the whole cache and check every block.")] = False,
) -> None:
    """Tokenize and cache the data of a configuration; a second call finds it done.

    Example: model-check prepare --preset debug --verify
    """
    prepare_with_progress(configured(preset, debug, config or [], overrides or []), verify=check)
    if check:
        typer.echo("data: every block matches its checksum")
