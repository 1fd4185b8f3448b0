"""From flags and environment variables to a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_check.config import Config, check_world, load_config, override_values
from model_check.config.faults import shown
from model_check.errors import ConfigError, UsageError

Values = dict[str, tuple[Any, str]]


def flag_values(
    *,
    max_steps: int | None = None,
    fast_dev_run: int = 0,
    batch_size: int | None = None,
    num_workers: int | None = None,
    profile: bool = False,
) -> Values:
    """The dotted keys that flags set, each with the flag it came from."""
    if max_steps is not None and fast_dev_run not in (0, max_steps):
        raise UsageError(
            f"--max-steps {max_steps} and --fast-dev-run {fast_dev_run} set training.max_steps to two different values",
            remedy="leave one of them out",
        )
    typed: Values = {
        "training.max_steps": (max_steps, "flag --max-steps"),
        "training.batch_size": (batch_size, "flag --batch-size"),
        "training.num_workers": (num_workers, "flag --num-workers"),
        "training.profile": (profile or None, "flag --profile"),
    }
    values = {key: given for key, given in typed.items() if given[0] is not None}
    if fast_dev_run:
        # A quick look at N batches leaves nothing behind that a real run would find.
        quiet = {"checkpoint.interval": 0, "logging.tensorboard": False, "logging.wandb": False}
        for key, value in {"training.max_steps": fast_dev_run, **quiet}.items():
            values[key] = (value, "flag --fast-dev-run")
    return values


def environment_values(environ: Mapping[str, str]) -> Values:
    """GPU_RANK of the earlier guides names the GPU of a one-GPU run."""
    gpu = _number(environ, "GPU_RANK", 0, "a GPU number")
    return {} if gpu is None else {"system.device_id": (gpu, "environment GPU_RANK")}


def gpu_count_from_environment(environ: Mapping[str, str]) -> int | None:
    """NUM_GPUS of the earlier guides: how many GPUs (or ranks) a job takes."""
    return _number(environ, "NUM_GPUS", 1, "a number of GPUs")


def _number(environ: Mapping[str, str], name: str, least: int, what: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) < least:
        raise UsageError(f"{name}={text} is not {what}", remedy=f"set it to {least} or higher, or unset it")
    return int(text)


def require_world(config: Config, world_size: int) -> None:
    """Raises all that is wrong with a configuration on this number of ranks."""
    if problems := check_world(config, world_size):
        raise ConfigError(problems)


def configured(
    preset: str | None, debug: bool, files: list[Path], overrides: list[str], values: Values | None = None
) -> Config:
    """The configuration that presets, files, flags and --set make, in that order."""
    if debug and preset not in (None, "debug"):
        raise UsageError(f"--debug is --preset debug, and --preset {preset} was given too", remedy="keep one of them")
    _check_one_meaning(values or {}, overrides)
    environment = environment_values(os.environ)
    return load_config(
        *files,
        preset="debug" if debug else preset,
        overrides=overrides,
        values={**environment, **(values or {})},
    )


def _check_one_meaning(flags: Values, overrides: list[str]) -> None:
    """A flag and a --set with two values for one key: nobody can have meant both, and one would win without a word."""
    sets = override_values(overrides)
    for key, (value, origin) in flags.items():
        flag = origin.removeprefix("flag ")
        # Of the keys that --fast-dev-run sets only the number of steps was typed; the others may be wanted after all.
        if key not in sets or sets[key] == value or (flag == "--fast-dev-run" and key != "training.max_steps"):
            continue
        typed = flag if value is True else f"{flag} {value}"
        text = sets[key] if isinstance(sets[key], str) else shown(sets[key])
        fact = f"{typed} and --set {key}={text} set one key to two different values"
        raise UsageError(fact, remedy="leave one of them out")
