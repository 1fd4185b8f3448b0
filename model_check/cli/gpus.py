"""`model-check gpus`: what there is, how busy it is, and what a job would take."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from model_check.cli.options import AsJson
from model_check.launch import choose_gpus, list_gpus


def gpus(
    choose: Annotated[
        str | None, typer.Option("--gpus", help="Which GPUs a job would take: all, auto, or ids such as 0,3 or 0-3.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the GPUs of this machine with memory, load and processes.

    Example: model-check gpus --gpus auto
    """
    found = list_gpus()
    chosen = {gpu.index for gpu in choose_gpus(choose, None, found)} if choose else set()
    if as_json:
        typer.echo(json.dumps([{**asdict(gpu), "chosen": gpu.index in chosen} for gpu in found], indent=2))
        return
    if not found:
        typer.echo("no NVIDIA GPU here: training uses CPU ranks (model-check train --nproc N)")
        return
    table = Table("id", "name", "memory used", "load", "processes", "chosen" if choose else "")
    for gpu in found:
        used = f"{gpu.memory_used / 2**30:.1f} / {gpu.memory_total / 2**30:.1f} GiB"
        load = "unknown" if gpu.utilization is None else f"{gpu.utilization} %"
        mark = "✓" if gpu.index in chosen else ""
        table.add_row(str(gpu.index), gpu.name, used, load, str(len(gpu.processes)), mark)
    Console().print(table)
