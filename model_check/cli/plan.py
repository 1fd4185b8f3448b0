"""`model-check plan`: what a configuration needs of a GPU, how it could be run, and which way is best."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from model_check.cli.flags import configured, flag_values, require_world
from model_check.cli.options import AsJson, BatchSize, ConfigFiles, Overrides, Preset
from model_check.engine.data_and_shape import shape_of
from model_check.errors import UsageError
from model_check.launch import Gpu, list_gpus
from model_check.plan.advice import Advice, advise, changes_of, fewest_gpus
from model_check.plan.devices import Device, device_named, parse_device
from model_check.plan.memory import CATEGORIES, GIB, MemoryPlan
from model_check.plan.options import LARGEST_BATCH, Job, Option
from model_check.plan.speed import GPUS_PER_HOST

SHOWN_CUTS = 4
# The driver keeps some of what NVML calls the total; CUDA never sees it.
DRIVER_SHARE = 0.005


def plan(
    preset: Preset = None,
    config: ConfigFiles = None,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="A GPU (H200, A100-40, or as nvidia-smi prints it) or its GiB (141, 80GB: the GB of a GPU's label are "
            "GiB). Default: the one here."
        ),
    ] = None,
    world_size: Annotated[int | None, typer.Option(help="GPUs of the job. Default: those here.", min=1)] = None,
    gpus_per_host: Annotated[int, typer.Option(help="GPUs that fast links connect.", min=1)] = GPUS_PER_HOST,
    batch_size: BatchSize = None,
    as_json: AsJson = False,
) -> int:
    """Say what a configuration needs of each GPU, which strategies fit, how fast they are, and which to take.

    Needs no GPU. Exits with 1 where the configuration as it stands does not fit.

    Example: model-check plan --preset full --gpu H100 --world-size 8
    """
    resolved = configured(preset, False, config or [], overrides or [], flag_values(batch_size=batch_size))
    device, ranks = _machine(gpu, world_size)
    job = Job(resolved, shape_of(resolved), ranks, device, gpus_per_host)
    require_world(resolved, ranks)
    option = job.as_configured()
    found = advise(job)
    if as_json:
        typer.echo(json.dumps(plan_record(job, option, found), indent=2))
    else:
        _show(job, option, found)
    return 0 if option.fits else 1


def _machine(gpu: str | None, world_size: int | None) -> tuple[Device, int]:
    return machine_of(list_gpus(), world_size) if gpu is None else (parse_device(gpu), world_size or 1)


def machine_of(visible: Sequence[Gpu], world_size: int | None) -> tuple[Device, int]:
    """The GPU to plan for and the number of ranks, as training on these GPUs would have them."""
    if not visible:
        raise UsageError("this machine shows no GPU to plan for", remedy="name one: --gpu H100, or its GiB: --gpu 80")
    device = smallest_device(visible)
    if device is None:
        raise UsageError(
            "the driver does not say how much memory the GPUs of this machine have",
            remedy="give it in GiB, such as --gpu 80",
        )
    return device, world_size or len(visible)


def smallest_device(gpus: Sequence[Gpu]) -> Device | None:
    """The GPU with the least memory decides; None where there is none, or the driver does not say."""
    known = [gpu for gpu in gpus if gpu.memory_total > 0]
    if not known or len(known) < len(gpus):
        return None
    gpu = min(known, key=lambda found: found.memory_total)
    return device_named(gpu.name, round(gpu.memory_total * (1 - DRIVER_SHARE)))


def plan_record(job: Job, option: Option, found: Advice | None) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "schema": 1,
        "gpu": {"name": job.device.name, "memory_gib": job.device.memory_bytes / GIB},
        "world_size": job.world_size,
        "parameters": job.shape.parameters(),
        "global_batch": job.global_batch,
        "as_configured": option_record(job, option),
        "options": [option_record(job, other) for other in job.options()],
        "advice": None if found is None else {"config": found.nested, **option_record(job, found.option)},
        "fits_from_gpus": None if found is not None and not found.option.load.offloads else fewest_gpus(job),
    }


def option_record(job: Job, option: Option) -> dict[str, Any]:
    """One way to run, for a program."""
    layout, load, speed = option.layout, option.load, option.speed
    return {
        "strategy": layout.strategy,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "context": layout.context,
        "shards": layout.shard,
        "replicas": layout.replicate,
        "keeps_gathered": layout.keep_gathered,
        "activation_checkpointing": load.recomputation,
        "batch_size": load.batch,
        "micro_batches": load.micro_batches,
        "optimizer_states": load.states,
        "cpu_offload": load.offloads,
        "fits": option.fits,
        "largest_batch": job.largest_batch(option),
        "memory": _memory_record(option.memory),
        "speed": None if speed is None else asdict(speed),
        "changes": changes_of(job, option),
    }


def _memory_record(memory: MemoryPlan) -> dict[str, Any]:
    return {
        "peak_gib": memory.allocated / GIB,
        "peak_moment": memory.peak.name,
        "parts_gib": {part: size / GIB for part, size in memory.peak.parts.items()},
        "moments_gib": {moment.name: moment.total / GIB for moment in memory.moments},
        "reserved_gib": memory.reserved / GIB,
        "outside_gib": memory.outside / GIB,
        "needed_gib": memory.needed / GIB,
        "host_gib": memory.host / GIB,
    }


def _show(job: Job, option: Option, found: Advice | None) -> None:
    console = Console(highlight=False)
    load = option.load
    console.print(
        f"{_count(job.shape.parameters())} parameters on {job.world_size:,} × {job.device.name} "
        f"({job.device.memory_bytes / GIB:.1f} GiB each)"
    )
    console.print(
        f"{load.batch} × {load.context} tokens × {load.micro_batches} micro-batch"
        f"{'es' if load.micro_batches > 1 else ''}, {load.precision}, {load.states} moments, "
        f"recomputation {load.recomputation}, {_layout_text(option)}"
    )
    console.print()
    _show_parts(console, option)
    console.print()
    _show_options(console, job, option)
    console.print()
    for line in _closing(job, option, found):
        console.print(line)


def _show_parts(console: Console, option: Option) -> None:
    memory = option.memory
    table = Table(box=None, pad_edge=False)
    table.add_column("GiB on each rank")
    for moment in memory.moments:
        style = "bold" if moment is memory.peak else ""
        table.add_column(moment.name + (" ◄ peak" if moment is memory.peak else ""), justify="right", style=style)
    for category in CATEGORIES:
        values = [moment.parts.get(category, 0.0) / GIB for moment in memory.moments]
        if any(value >= 0.005 for value in values):
            table.add_row(category, *(f"{value:.2f}" for value in values))
    table.add_row("allocated", *(f"{moment.total / GIB:.2f}" for moment in memory.moments), style="bold")
    console.print(table)
    verdict = "fits" if option.fits else "does not fit"
    console.print(
        f"with slack, CUDA and NCCL {memory.needed / GIB:.1f} of {option.device_bytes / GIB:.1f} GiB: "
        + f"[{'green' if option.fits else 'red'}]{verdict}[/]"
        + (f"; {memory.host / GIB:.1f} GiB of host memory" if memory.host else "")
    )
    if option.speed is not None:
        console.print(
            f"a step takes about {_seconds(option.speed.step_s)}: {option.speed.tokens_per_s:,.0f} tokens/s, "
            f"MFU {option.speed.mfu:.0%}"
        )


def _show_options(console: Console, job: Job, option: Option) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("strategy", "recompute"):
        table.add_column(name)
    for name in ("batch", "needs", "", "largest", "step", "MFU"):
        table.add_column(name, justify="right")
    for other in _worth_showing(job, option):
        speed = other.speed
        table.add_row(
            _layout_text(other, short=True),
            other.load.recomputation,
            f"{other.load.batch} × {other.load.micro_batches}",
            f"{other.memory.needed / GIB:.1f}",
            Text("fits", style="green") if other.fits else Text("no", style="red"),
            _batch_text(job.largest_batch(other)),
            _seconds(speed.step_s) if speed is not None else "-",
            f"{speed.mfu:.0%}" if speed is not None else "-",
        )
    console.print(table)
    console.print(
        "batch: sequences × micro-batches a step; needs: GiB on each rank; largest: the largest batch that fits",
        style="dim",
    )


def _worth_showing(job: Job, option: Option) -> Iterator[Option]:
    """All of the cut that is configured, as training would gather it; of the others the fastest few that fit."""
    cut = (option.layout.tensor, option.layout.pipeline)
    for other in job.options():
        if (other.layout.tensor, other.layout.pipeline) == cut and "fsdp.reshard" not in changes_of(job, other):
            yield other
    best: dict[tuple[int, int], Option] = {}
    for other in job.options():
        key = (other.layout.tensor, other.layout.pipeline)
        if key != cut and other.fits and (key not in best or other.seconds_per_token < best[key].seconds_per_token):
            best[key] = other
    yield from sorted(best.values(), key=lambda o: o.seconds_per_token)[:SHOWN_CUTS]


def _layout_text(option: Option, *, short: bool = False) -> str:
    layout = option.layout
    words: list[str] = [layout.strategy]
    for letter, name, size in (("tp", "tensor", layout.tensor), ("pp", "pipeline", layout.pipeline)):
        if size > 1:
            words.append(f"{letter}{size}" if short else f"{name} {size}")
    if layout.shards and not layout.keep_gathered:
        words.append("resharding")
    return " ".join(words)


def _batch_text(batch: int) -> str:
    return f"≥ {batch}" if batch == LARGEST_BATCH else str(batch)


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.1f} M"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


def _typed(key: str, origin: str) -> str:
    """How the command line has set a key; empty where it has not."""
    return f"--set {key}" if origin == "--set" else origin.removeprefix("flag ") if origin.startswith("flag ") else ""


def _closing(job: Job, option: Option, found: Advice | None) -> Iterator[str]:
    if found is None:
        gpus = fewest_gpus(job)
        yield "nothing fits on this many GPUs" + (f"; it does from {gpus:,} on" if gpus else "")
        return
    if not found.changes:
        yield "advice: keep it as it is"
        return
    speed = found.option.speed
    pace = f", {_seconds(speed.step_s)} a step" if speed is not None else ""
    yield f"advice ({found.option.memory.needed / GIB:.1f} GiB{pace}):"
    yield json.dumps(found.nested, indent=2)
    if typed := [words for key in found.changes if (words := _typed(key, job.config.origins.get(key, "")))]:
        yield f"a file does not overrule the command line: leave out {', '.join(typed)}"
    if found.option.load.offloads:
        gpus = fewest_gpus(job)
        yield f"offloading needs {found.option.memory.host / GIB:.0f} GiB of host memory for each rank" + (
            f"; without it the model fits from {gpus:,} GPUs on" if gpus else ""
        )
