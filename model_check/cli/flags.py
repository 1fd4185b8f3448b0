"""From flags and environment variables to a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_check.config import Config, load_config, override_values
from model_check.config.faults import shown
from model_check.errors import UsageError

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
    values: Values = {}
    if max_steps is not None and fast_dev_run not in (0, max_steps):
        raise UsageError(
            f"--max-steps {max_steps} and --fast-dev-run {fast_dev_run} say two things of training.max_steps",
            remedy="leave one of them out",
        )
    if max_steps is not None:
        values["training.max_steps"] = (max_steps, "flag --max-steps")
    if batch_size is not None:
        values["training.batch_size"] = (batch_size, "flag --batch-size")
    if num_workers is not None:
        values["training.num_workers"] = (num_workers, "flag --num-workers")
    if profile:
        values["training.profile"] = (True, "flag --profile")
    if fast_dev_run:
        # A quick look at N batches leaves nothing behind that a real run would find.
        for key, value in (
            ("training.max_steps", fast_dev_run),
            ("checkpoint.interval", 0),
            ("logging.tensorboard", False),
            ("logging.wandb", False),
        ):
            values[key] = (value, "flag --fast-dev-run")
    return values


def environment_values(environ: Mapping[str, str]) -> Values:
    """GPU_RANK of the earlier guides names the GPU of a one-GPU run."""
    text = environ.get("GPU_RANK")
    if text is None:
        return {}
    if not text.isdigit():
        raise UsageError(f"GPU_RANK={text} is not a GPU number", remedy="set it to 0 or higher, or unset it")
    return {"system.device_id": (int(text), "environment GPU_RANK")}


def gpu_count_from_environment(environ: Mapping[str, str]) -> int | None:
    """NUM_GPUS of the earlier guides: how many GPUs (or ranks) a job takes."""
    text = environ.get("NUM_GPUS")
    if text is None:
        return None
    if not text.isdigit() or int(text) == 0:
        raise UsageError(f"NUM_GPUS={text} is not a number of GPUs", remedy="set it to 1 or higher, or unset it")
    return int(text)


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
        raise UsageError(f"{typed} and --set {key}={text} say two things of one key", remedy="leave one of them out")
