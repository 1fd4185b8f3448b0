"""The flags that several verbs have: declared once, so that they read and work the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]

Preset = Annotated[str | None, typer.Option("--preset", help="debug, production, full, stable, 14b or 32b.")]
Debug = Annotated[bool, typer.Option("--debug", help="The same as --preset debug.")]
ConfigFiles = Annotated[
    list[Path] | None, typer.Option("--config", help="A JSON or YAML file; repeatable, later ones win.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="One value, e.g. --set training.batch_size=4; repeatable.")
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", help="Sequences per rank and forward pass.")]
Gpus = Annotated[str | None, typer.Option("--gpus", help="all, auto (least used), or ids: 3, 0,3 or 0-3.")]

RunDirMode = Annotated[
    str,
    typer.Option(
        "--run-dir-mode", metavar="MODE", help="Permissions of a new run directory, in octal: 0750 for a group."
    ),
]
