"""The rules between keys. Each returns problems with an MC8xx code; none stops at the first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from model_check.config import codes
from model_check.config.layouts import layout_problems, replica_problems, shard_problems
from model_check.config.resolve import base_shape, may_be_hub_id, size_problems
from model_check.errors import Problem, UsageError

if TYPE_CHECKING:
    from model_check.config.schema import Config

_GPU_KERNELS = ("cudnn", "flash", "flash_attn")
_DOTTED_KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+\b")


def rule_problems(config: Config) -> list[Problem]:
    """Everything that is wrong between the keys of a config whose values are each fine alone."""
    rules = (_model_rules, _schedule_rules, _batch_rules, _device_rules, layout_problems)
    return [_with_origins(problem, config) for rule in rules for problem in rule(config)]


def _with_origins(problem: Problem, config: Config) -> Problem:
    """Says of each key in the sentence where its value was set, so that the user knows which file to open."""
    origins = config.origins
    keys = dict.fromkeys([problem.key, *_DOTTED_KEY.findall(problem.message)])
    places = {key: origins[key] for key in keys if origins.get(key, "default") != "default"}
    if not places:
        return problem
    if len(set(places.values())) == 1:
        where = f"from {next(iter(places.values()))}"
    else:
        where = ", ".join(f"{key} from {origin}" for key, origin in places.items())
    return replace(problem, message=f"{problem.message} ({where})")


def _model_rules(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.init == "pretrained" and model.model_path is None:
        yield Problem(
            codes.NOTHING_PRETRAINED,
            "model.init",
            "model.init=pretrained, but model.model_path is null",
            "set model.model_path to a folder or a hub id, or model.init to random",
        )
        return
    try:
        base = base_shape(model.model_path)
    except UsageError as error:
        if error.code != codes.UNKNOWN_MODEL or not may_be_hub_id(str(model.model_path)):
            yield Problem(error.code or codes.UNKNOWN_MODEL, "model.model_path", error.message, error.remedy)
            return
        base = None  # only the hub knows its shape
    yield from size_problems(model, base)
    context = config.training.context_length
    if model.init == "pretrained" and base is not None and context > base.max_position:
        yield Problem(
            codes.CONTEXT_TOO_LONG,
            "training.context_length",
            f"training.context_length={context} is longer than the {base.max_position} positions that "
            f"the weights of model.model_path={model.model_path} know",
            f"lower it to {base.max_position}",
        )


def _schedule_rules(config: Config) -> Iterator[Problem]:
    training, scheduler = config.training, config.training.scheduler
    # A flag cuts a run short for a trial: the schedule of the real run must not be in its way.
    is_trial = config.origins["training.max_steps"].startswith("flag ")
    if scheduler.warmup_steps > training.max_steps and not is_trial:
        yield Problem(
            codes.WARMUP_TOO_LONG,
            "training.scheduler.warmup_steps",
            f"training.scheduler.warmup_steps={scheduler.warmup_steps} exceeds "
            f"training.max_steps={training.max_steps}, so the full learning rate is never reached",
            f"lower the warm-up to {max(1, training.max_steps // 10)} steps or train longer",
        )
    elif scheduler.type == "wsd" and not is_trial:
        decay = round(scheduler.decay_fraction * training.max_steps)
        if scheduler.warmup_steps + decay > training.max_steps:
            yield Problem(
                codes.NO_STABLE_PHASE,
                "training.scheduler.decay_fraction",
                f"training.scheduler.warmup_steps={scheduler.warmup_steps} and the {decay} steps of "
                f"training.scheduler.decay_fraction={scheduler.decay_fraction:g} exceed "
                f"training.max_steps={training.max_steps}",
                "lower one of the two, or train longer",
            )
    if config.debug.on_nan == "rollback" and config.checkpoint.interval == 0:
        yield Problem(
            codes.NOTHING_TO_GO_BACK_TO,
            "debug.on_nan",
            "debug.on_nan=rollback, but checkpoint.interval=0 saves nothing to go back to",
            "set checkpoint.interval to 100, or debug.on_nan to skip",
        )
    if training.eval_interval and config.data.validation_fraction == 0:
        yield Problem(
            codes.NOTHING_TO_EVALUATE,
            "training.eval_interval",
            f"training.eval_interval={training.eval_interval}, but data.validation_fraction=0 holds no data out",
            "set data.validation_fraction to 0.01, or training.eval_interval to 0",
        )


def _batch_rules(config: Config) -> Iterator[Problem]:
    """Only what is wrong with any number of ranks; `check_world` knows the rest."""
    training = config.training
    unit = training.batch_size * (training.grad_accum_nums or 1)
    if training.global_batch is None or training.global_batch % unit == 0:
        return
    name = "batch_size" if training.grad_accum_nums is None else "batch_size*grad_accum_nums"
    yield _not_divisible(training.global_batch, unit, name)


def _not_divisible(global_batch: int, unit: int, name: str) -> Problem:
    below = global_batch // unit * unit
    choices = " or ".join(str(size) for size in (below, below + unit) if size)
    return Problem(
        codes.GLOBAL_BATCH_NOT_DIVISIBLE,
        "training.global_batch",
        f"global_batch={global_batch} is not divisible by {name}={unit}",
        f"try {choices}",
    )


def _device_rules(config: Config) -> Iterator[Problem]:
    system, kernel = config.system, config.model.attention_backend
    precision = config.training.compute_precision
    if system.device == "cpu" and system.device_id is not None:
        yield Problem(
            codes.DEVICE_ID_WITHOUT_GPU,
            "system.device_id",
            f"system.device_id={system.device_id} names a GPU, but system.device=cpu",
            "set system.device to cuda, or system.device_id to null",
        )
    if system.device == "cpu" and system.backend == "nccl":
        yield Problem(
            codes.NCCL_WITHOUT_GPU,
            "system.backend",
            "system.backend=nccl connects GPUs only, but system.device=cpu",
            "set system.backend to gloo or null",
        )
    if kernel in _GPU_KERNELS and system.device == "cpu":
        yield Problem(
            codes.KERNEL_WITHOUT_GPU,
            "model.attention_backend",
            f"model.attention_backend={kernel} runs on GPUs only, but system.device=cpu",
            "set model.attention_backend to auto",
        )
    elif kernel in _GPU_KERNELS and precision == "fp32":
        cause = "training.precision=fp32" if config.training.use_amp else "training.use_amp=false means fp32"
        yield Problem(
            codes.KERNEL_NEEDS_HALF,
            "model.attention_backend",
            f"model.attention_backend={kernel} computes in bf16 or fp16 only, but {cause}",
            "set model.attention_backend to auto, or train in bf16",
        )


def _profile_problems(config: Config, world_size: int) -> Iterator[Problem]:
    """A profile of ranks that do not exist would be an empty folder. One that does exist is enough."""
    training = config.training
    if not training.profile or any(rank < world_size for rank in training.profile_ranks):
        return
    ranks = "rank 0 alone" if world_size == 1 else f"ranks 0 to {world_size - 1}"
    yield Problem(
        codes.OUT_OF_RANGE,
        "training.profile_ranks",
        f"training.profile_ranks={list(training.profile_ranks)} names none of the ranks, and this job has {ranks}",
        "name at least one of them, or leave it out for rank 0",
    )


def check_world(config: Config, world_size: int) -> list[Problem]:
    """What is wrong once the number of ranks is known."""
    parallel = config.parallel
    group = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % group:
        return [
            Problem(
                codes.RANKS_NOT_DIVISIBLE,
                "parallel",
                f"{world_size} ranks are not divisible by tensor*pipeline*context={group}",
                f"start {group} ranks or a multiple of it, or lower parallel.tensor, pipeline or context",
            )
        ]
    data_parallel = config.data_parallel(world_size)
    rules = (shard_problems(config, data_parallel), replica_problems(config, world_size))
    problems = [problem for rule in (*rules, _profile_problems(config, world_size)) for problem in rule]
    return problems or list(_global_batch_problems(config, data_parallel))


def _global_batch_problems(config: Config, data_parallel: int) -> Iterator[Problem]:
    training = config.training
    if training.global_batch is None:
        return
    unit = training.batch_size * data_parallel
    product = unit * (training.grad_accum_nums or 1)
    if training.grad_accum_nums is None and training.global_batch % unit:
        yield _not_divisible(training.global_batch, unit, "batch_size*dp")
    elif training.grad_accum_nums is not None and product != training.global_batch:
        yield Problem(
            codes.GLOBAL_BATCH_MISMATCH,
            "training.global_batch",
            f"global_batch={training.global_batch} differs from batch_size*grad_accum_nums*dp={product}",
            f"set training.global_batch to {product}, or training.grad_accum_nums to null to have it derived",
        )
