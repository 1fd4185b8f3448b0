"""Before a launch: does the run fit into these GPUs and this host? A run that does not is refused, or made to fit.

The plan of the run goes into its directory: should it run out of memory all the same, the finding compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from model_check.cli.plan import option_record, smallest_device
from model_check.config import Config
from model_check.config.eight_bit import torchao_is_installed
from model_check.config.resolve import may_be_hub_id
from model_check.engine.data_and_shape import shape_of
from model_check.errors import UsageError
from model_check.launch import Gpu
from model_check.plan.advice import Advice, advise, describe_need, fewest_gpus, remedies
from model_check.plan.choice import choose_layout
from model_check.plan.memory import GIB, plan_state
from model_check.plan.options import Job, Option
from model_check.plan.workload import workload_of
from model_check.record.cgroups import container_limit


@dataclass(frozen=True)
class Fitted:
    """The configuration to launch, and its plan where the GPUs are known."""

    config: Config
    plan: dict[str, Any] | None = None


def fit_to_gpus(
    config: Config,
    gpus: Sequence[Gpu],
    *,
    world_size: int,
    ranks_per_host: int,
    force: bool,
    say: Callable[[str], None],
) -> Fitted:
    """The configuration, changed where `parallel.strategy: auto` lets the plan do so; UsageError where it cannot be."""
    device = smallest_device(gpus)
    if device is None:
        return Fitted(config)
    if _shape_is_on_the_hub(config):
        return Fitted(config)
    job = Job(config, shape_of(config), world_size, device, ranks_per_host)
    option = job.as_configured()
    if option.fits or force:
        say_if_crowded(gpus, option, say)
        if not option.fits:
            say(f"plan: {describe_need(option)}; tried all the same (--force)")
        return Fitted(config, run_plan(job, option))
    host_bytes = _host_bytes() / ranks_per_host
    eight_bit = torchao_is_installed()
    if config.parallel.strategy == "auto":
        found = advise(job, eight_bit=eight_bit, host_bytes=host_bytes, may_change=_free_keys(config))
        if found is not None and found.changes:
            taken = f"{found.as_flags}{_torchao_hint(job, found)}"
            say(f"plan: {describe_need(option)}; parallel.strategy=auto takes {taken}")
            changed = replace(job, config=config.with_values(found.changes, "plan"))
            return Fitted(changed.config, run_plan(changed, changed.as_configured()))
    if not option.memory.cannot_fit(device.memory_bytes):
        say(f"plan: {describe_need(option)}; it may just fit")
        return Fitted(config, run_plan(job, option))
    found = advise(job, eight_bit=eight_bit, host_bytes=host_bytes)
    raise UsageError(f"this run cannot fit: {describe_need(option)}", remedy=_remedy(job, found), code="MC503")


def check_host_memory(
    config: Config, *, on_gpu: bool, world_size: int, ranks_per_host: int, force: bool, say: Callable[[str], None]
) -> None:
    """Refuses a run whose ranks need more memory than this host has: the kernel would kill them one by one.

    Counts only what every run needs: parameters, gradients and optimizer states.
    """
    if _shape_is_on_the_hub(config) or (on_gpu and not config.fsdp.cpu_offload):
        return
    parameters = shape_of(config).parameters()
    layout = choose_layout(config, world_size, ranks_per_host=ranks_per_host, parameters=parameters)
    load = workload_of(config, world_size)
    # CPU ranks store their parameters in float32, whatever precision their products use.
    state = plan_state(parameters, load if on_gpu else replace(load, precision="fp32"), layout)
    needed = ranks_per_host * (state.host if on_gpu else state.allocated + state.host)
    host = _host_bytes()
    if needed <= host:
        return
    ranks = f"{ranks_per_host} {'GPU' if on_gpu else 'CPU'} rank{'s' if ranks_per_host > 1 else ''}"
    fact = (
        f"the parameters, gradients and optimizer states of {ranks} need {needed / GIB:.1f} GiB of host memory, and "
        f"this host has {host / GIB:.1f}"
    )
    if force:
        say(f"plan: {fact}; tried all the same (--force)")
        return
    smaller = "set fsdp.cpu_offload=false or use more hosts" if on_gpu else "take a smaller model (--preset debug)"
    raise UsageError(f"this run cannot fit: {fact}", remedy=f"{smaller}, or --force to try all the same", code="MC503")


def _host_bytes() -> int:
    """Memory of this host, or of the container that this process runs in."""
    total = psutil.virtual_memory().total
    return min(total, container_limit() or total)


def say_if_crowded(gpus: Sequence[Gpu], option: Option, say: Callable[[str], None]) -> None:
    """What other processes hold now is theirs to give back: a warning, for they may be on their way out."""
    for gpu in gpus:
        if gpu.memory_free < option.memory.needed <= gpu.memory_total:
            say(
                f"plan: GPU {gpu.index} has {gpu.memory_free / GIB:.1f} GiB free, and a rank needs "
                f"{option.memory.needed / GIB:.1f}: others hold {gpu.memory_used / GIB:.1f} (see model-check gpus)"
            )


def run_plan(job: Job, option: Option) -> dict[str, Any]:
    """What plan.json of a run directory holds."""
    return {
        "schema": 1,
        "gpu": job.device.name,
        "gpu_gib": job.device.memory_bytes / GIB,
        "world_size": job.world_size,
        **option_record(job, option),
        "remedies": [remedy.record() for remedy in remedies(job, option)],
    }


def _shape_is_on_the_hub(config: Config) -> bool:
    """Nothing on this machine says yet how large the model is."""
    return config.model.model_path is not None and may_be_hub_id(config.model.model_path)


def _free_keys(config: Config) -> frozenset[str]:
    """What nobody has set, and where parameters live: that is what `auto` is asked to decide."""
    unset = {key for key, origin in config.origins.items() if origin == "default"}
    return frozenset(unset | {"parallel.strategy"})


def _remedy(job: Job, found: Advice | None) -> str:
    if found is None and job.config.training.oom_retry:
        # Repeating a step on one rank alone needs whole models, which is what does not fit.
        settled = replace(job, config=job.config.with_values({"training.oom_retry": False}, "plan"))
        found = advise(settled, eight_bit=torchao_is_installed(), host_bytes=0)
        if found is not None:
            found = replace(found, changes={"training.oom_retry": False, **found.changes})
    if found is not None:
        fits = f"add {found.as_flags} ({found.option.memory.needed / GIB:.1f} GiB)"
    elif gpus := fewest_gpus(job):
        fits = f"it fits from {gpus} such GPUs on"
    else:
        fits = "take a smaller model or a shorter training.context_length"
    return f"{fits}{_torchao_hint(job, found)}, or --force to try all the same"


def _torchao_hint(job: Job, found: Advice | None) -> str:
    """Where a package that is missing would do better than offloading, or than nothing."""
    if torchao_is_installed() or (found is not None and not found.option.load.offloads):
        return ""
    small = advise(job, eight_bit=True, host_bytes=0)
    return f"; with torchao (pip install torchao) {small.as_flags} is enough" if small is not None else ""
