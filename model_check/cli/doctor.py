"""`model-check doctor`: a table of checks with a mark, a sentence and a remedy each, and an exit code."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from model_check.cli.flags import configured
from model_check.cli.options import AsJson, ConfigFiles, Overrides, Preset
from model_check.cli.unwinding import signals_unwind_us
from model_check.config import Config
from model_check.doctor import Check, Places, Settings, chosen_stages, examine
from model_check.launch import list_gpus
from model_check.plan.flops import peak_flops

MARKS = {"ok": ("✓", "green"), "warn": ("!", "bold yellow"), "fail": ("✗", "bold red"), "skip": ("–", "dim")}
TITLES = {
    "basic": "Python, torch, host",
    "imports": "Imports, one by one",
    "gpu": "GPUs",
    "train": "Training on one device",
    "ranks": "Ranks",
    "comm": "Communication",
    "disk": "Disks",
    "hub": "Hugging Face hub",
    "data": "Data",
}
_NAME_WIDTH = 22
_PREFIX = {"imports": "import "}  # the title says it once
_WIDEST = 160
_IN_A_PIPE = 120


def doctor(
    only: Annotated[
        str | None, typer.Option(help="Stages, e.g. basic,imports,gpu,train,ranks,comm,disk,hub,data.")
    ] = None,
    as_json: AsJson = False,
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
) -> int:
    """Say in under a minute whether this machine can train, and what to do about each thing that is not well.

    It looks at the folders that the configuration names, e.g. --set checkpoint.dir=/data/checkpoints.

    Exit code: 0 where nothing failed (warnings do not count), 1 where something did.

    Example: model-check doctor --only basic,gpu
    """
    stages = chosen_stages(only)
    settings = settings_for(configured(preset, False, config or [], overrides or []))
    started = time.monotonic()
    with signals_unwind_us():
        if as_json:
            found = [check for stage in stages for check in examine(stage, settings)]
            typer.echo(json.dumps({"checks": [check.to_json() for check in found]}, indent=2, ensure_ascii=False))
        else:
            found = _show(stages, settings)
            typer.echo(summary(found, time.monotonic() - started))
    return int(any(check.status == "fail" for check in found))


def settings_for(config: Config) -> Settings:
    """What a run with this configuration would use, on the GPUs it may see."""
    places = Places(checkpoints=Path(config.checkpoint.dir), cache=Path(config.data.cache_dir))
    gpus = () if config.system.device == "cpu" else tuple(list_gpus())
    return Settings(places=places, gpus=gpus, peak=lambda name: peak_flops(name, "bf16") or peak_flops(name, "fp16"))


def _show(stages: list[str], settings: Settings) -> list[Check]:
    """Stage by stage as they end, so that a person sees at once that something happens."""
    console = _console()
    found: list[Check] = []
    for stage in stages:
        started = time.monotonic()
        with console.status(f"{TITLES[stage]} …"):
            checks = list(examine(stage, settings))
        found += checks
        took = time.monotonic() - started
        console.print(Text(TITLES[stage], style="bold") + Text(f"  {stage}, {took:.1f} s", style="dim"))
        console.print(stage_table(checks, _PREFIX.get(stage, "")))
        console.print()
    return found


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(console.width, _WIDEST) if sys.stdout.isatty() else _IN_A_PIPE
    return console


def stage_table(checks: list[Check], prefix: str = "") -> Table:
    """Mark, name without the prefix all share, sentence; the remedy hangs below its sentence."""
    table = Table.grid(padding=(0, 1), pad_edge=False)
    table.add_column(width=3, justify="right")
    table.add_column(width=_NAME_WIDTH, overflow="fold")
    table.add_column(overflow="fold")
    for check in checks:
        mark, style = MARKS[check.status]
        plain = "dim" if check.status == "skip" else ""
        name = Text(check.name.removeprefix(prefix), style=plain)
        table.add_row(Text(mark, style=style), name, Text(check.detail, style=plain))
        if check.fix:
            remedy = Table.grid(padding=(0, 1))
            remedy.add_row(Text("→", style=style), Text(check.fix, style="cyan", overflow="fold"))
            table.add_row("", "", remedy)
    return table


def summary(checks: list[Check], seconds: float) -> str:
    """One line: can I train here?"""
    count = Counter(check.status for check in checks)
    verdict = "not ready" if count["fail"] else "ready, with warnings" if count["warn"] else "ready"
    parts = [f"{count['ok']} passed"]
    parts += [f"{count['warn']} warning{'s' if count['warn'] != 1 else ''}"] if count["warn"] else []
    parts += [f"{count['fail']} failed"] if count["fail"] else []
    parts += [f"{count['skip']} skipped"] if count["skip"] else []
    return f"{verdict}: {', '.join(parts)}, in {seconds:.0f} s"
