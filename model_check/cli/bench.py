"""`model-check bench`: four short measurements of this machine, each a table or JSON."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from model_check.cli.doctor import settings_for
from model_check.cli.flags import Values, configured
from model_check.cli.options import AsJson, ConfigFiles, Gpus, Overrides, Preset
from model_check.cli.unwinding import signals_unwind_us
from model_check.config import override_values
from model_check.errors import LaunchError, UsageError

_LIMIT_S = 1800.0
_FEWEST_STEPS, _STEPS = 4, 20
# What each measurement shows: a key of its rows, the title of the column, and how a value is written.
_COLUMNS = {
    "throughput": {
        "tokens_per_s": ("tokens/s", "{:,.0f}"),
        "step_s": ("step", "{:.3f} s"),
        "data_wait_s": ("waits for data", "{:.4f} s"),
        "mfu": ("MFU", "{:.1%}"),
        "memory_gib": ("memory", "{:.1f} GiB"),
        "final_loss": ("last loss", "{:.4f}"),
        "steps": ("steps counted", "{}"),
    },
    "data": {
        "workers": ("threads", "{}"),
        "ms_per_batch": ("a batch takes", "{:.3f} ms"),
        "ms_worst": ("the slowest", "{:.3f} ms"),
        "tokens_per_s": ("tokens/s", "{:,.0f}"),
    },
    "comm": {
        "collective": ("collective", "{}"),
        "size": ("bytes", "{:,}"),
        "seconds": ("takes", "{:.6f} s"),
        "algorithm_gb_s": ("algorithm GB/s", "{:.3f}"),
        "bus_gb_s": ("bus GB/s", "{:.3f}"),
        "ranks": ("ranks", "{}"),
    },
    "startup": {
        "way": ("start", "{}"),
        "ranks": ("ranks", "{}"),
        "median_s": ("command to first step", "{:.1f} s"),
    },
}


def throughput(
    steps: Annotated[
        int | None, typer.Option(min=_FEWEST_STEPS, help="Steps; the first quarter is not counted (default 20).")
    ] = None,
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    gpus: Gpus = None,
    nproc: Annotated[int | None, typer.Option(help="Number of ranks.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens per second of a configuration, through the real trainer.

    Example: model-check bench throughput --preset debug --steps 20
    """
    from model_check.doctor.bench.training import measure_training

    files = [path.resolve() for path in config or []]
    # A default that nobody typed must not contradict a --set that somebody did.
    by_set = steps is None and "training.max_steps" in override_values(overrides or [])
    flags: Values = {} if by_set else {"training.max_steps": (steps or _STEPS, "flag --steps")}
    resolved = configured(preset, False, files, overrides or [], flags)
    steps = resolved.training.max_steps
    if steps < _FEWEST_STEPS:
        raise UsageError(
            f"training.max_steps={steps} (from --set) leaves too little to measure",
            remedy=f"set it to {_FEWEST_STEPS} or more",
        )
    words = [
        word
        for flag, value in (("--preset", preset), ("--gpus", gpus), ("--nproc", nproc))
        if value is not None
        for word in (flag, str(value))
    ]
    words += [word for path in files for word in ("--config", str(path))]
    words += [word for value in overrides or [] for word in ("--set", value)]
    with signals_unwind_us():
        cached = resolved.origins["data.cache_dir"] != "default"
        result = measure_training(settings_for(resolved), words, steps, _LIMIT_S, keeps_cache=cached)
    _show("throughput", [asdict(result)], as_json)


def data(
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens in a sequence.")] = 512,
    workers: Annotated[str, typer.Option(help="Numbers of loader threads, e.g. 0,2.")] = "0,1,2",
    batches: Annotated[int, typer.Option(min=1, help="Batches measured for each.")] = 200,
    as_json: AsJson = False,
) -> None:
    """How long the loader takes to make a batch, from a fresh cache of random tokens.

    Example: model-check bench data --batch 8 --context 2048
    """
    from model_check.doctor.bench.loading import measure_loading

    counts = _numbers("--workers", workers)
    rows = [asdict(row) for row in measure_loading(batch, context, counts, batches)]
    _show("data", rows, as_json)


def comm(
    nproc: Annotated[int | None, typer.Option(min=2, help="Ranks (default: all GPUs, or 2 CPU ranks).")] = None,
    sizes: Annotated[str | None, typer.Option(help="Bytes, e.g. 64K,1M,16M,256M.")] = None,
    as_json: AsJson = False,
) -> None:
    """Bandwidth of all-reduce, all-gather and reduce-scatter between the ranks of this machine, by size.

    Example: model-check bench comm --sizes 1M,16M
    """
    from model_check.doctor.comm import measure

    with signals_unwind_us():
        measured = measure(settings_for(configured(None, False, [], [])), _sizes(sizes) if sizes else None, nproc)
    if measured.problem:
        raise LaunchError(measured.problem, remedy="model-check doctor --only ranks finds out why")
    rows = [{"ranks": measured.ranks, "device": measured.kind, **asdict(rate)} for rate in measured.rates]
    _show("comm", rows, as_json)


def startup(
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks (default: all GPUs, or 2 CPU ranks).")] = None,
    ways: Annotated[
        str, typer.Option(help="Which to measure: warm, gate, cold, torchrun.")
    ] = "warm,gate,cold,torchrun",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median is shown.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Seconds from the command to the first step: warm start, gate, cold start and plain torchrun side by side.

    Example: model-check bench startup --nproc 4 --ways warm,torchrun
    """
    from model_check.doctor.bench.starting import WAYS, measure_starts

    chosen = [way.strip() for way in ways.split(",") if way.strip()]
    unknown = [way for way in chosen if way not in WAYS]
    if unknown or not chosen:
        raise UsageError(f"--ways {ways} cannot be read", remedy=f"use one or more of {','.join(WAYS)}")
    settings = settings_for(configured(None, False, [], []))
    ranks = nproc or len(settings.gpus) or settings.cpu_ranks
    with signals_unwind_us():
        starts = list(measure_starts(settings, chosen, ranks, rounds))
    rows = [{**asdict(start), "median_s": start.median_s} for start in starts]
    _show("startup", rows, as_json)


def _numbers(flag: str, text: str) -> list[int]:
    if not re.fullmatch(r"\s*\d{1,3}\s*(,\s*\d{1,3}\s*)*", text):
        raise UsageError(f"{flag} {text} cannot be read", remedy="give numbers with commas between them, e.g. 0,2")
    return [int(word) for word in text.split(",")]


def _sizes(text: str) -> list[int]:
    """`64K,1M` in bytes."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*([KMG]?)(i?B)?\s*", word, re.IGNORECASE)
        if match is None or int(match[1]) == 0:
            raise UsageError(f"--sizes {text} cannot be read at '{word.strip()}'", remedy="write 64K,1M,16M")
        found.append(int(match[1]) * 1024 ** " KMG".index((match[2] or " ").upper()))
    return found


def _show(name: str, rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"bench": name, "machine": _machine(), "rows": list(rows)}, indent=2))
        return
    columns = _COLUMNS[name]
    table = Table(*(title for title, _ in columns.values()))
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        cells = [(row[key], form) for key, (_, form) in columns.items()]
        table.add_row(*("–" if value is None else form.format(value) for value, form in cells))
    Console(highlight=False).print(table)


def _machine() -> dict[str, Any]:
    """What the numbers belong to."""
    from model_check.launch import list_gpus
    from model_check.record.environment import package_versions

    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [gpu.name for gpu in list_gpus()],
        "python": platform.python_version(),
        "torch": package_versions(["torch"])["torch"],
        "load_average": os.getloadavg()[0],
    }
