"""How fast training is here: the real trainer for a few steps, read from its own metrics."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from model_check.doctor.jobs import finished_job, scratch_folder
from model_check.doctor.settings import Settings
from model_check.errors import LaunchError
from model_check.record.metrics import StepMetrics

QUIET = ("checkpoint.interval=0", "logging.tensorboard=false", "logging.wandb=false", "training.eval_interval=0")


@dataclass(frozen=True)
class Throughput:
    """Medians over the steps that count. `mfu` is None where the peak of the device is not known."""

    steps: int
    tokens_per_s: float
    step_s: float
    data_wait_s: float
    memory_gib: float | None
    mfu: float | None
    final_loss: float


def measure_training(
    settings: Settings, arguments: Sequence[str], steps: int, limit_s: float, *, keeps_cache: bool = False
) -> Throughput:
    """`model-check train ARGUMENTS` for that many steps; the first quarter warms up and is not counted.

    The arguments may name files and folders from where we are: so does the run, which writes elsewhere. `keeps_cache`:
    they name the folder of the tokenized data too.
    """
    with scratch_folder() as folder:
        words = [*arguments, *_writing_to(folder, keeps_cache), "--max-steps", str(steps)]
        with finished_job(settings.train, words, settings, limit_s=limit_s, cwd=Path.cwd()) as job:
            if job.problem:
                remedy = "model-check train shows the whole story"
                raise LaunchError(f"the measured run failed: {job.problem}", remedy=remedy)
            return summarised(job.metrics)


def _writing_to(folder: Path, keeps_cache: bool) -> list[str]:
    values = [*QUIET, f"checkpoint.dir={folder / 'checkpoints'}"]
    if not keeps_cache:
        values.append(f"data.cache_dir={folder / 'cache'}")
    return [word for value in values for word in ("--set", value)]


def summarised(records: Sequence[StepMetrics]) -> Throughput:
    counted = records[len(records) // 4 :]

    def median(key: str) -> float | None:
        values = [value for step in counted if (value := getattr(step, key)) is not None]
        return statistics.median(values) if values else None

    return Throughput(
        steps=len(counted),
        tokens_per_s=median("tokens_per_s") or 0.0,
        step_s=median("step_s") or 0.0,
        data_wait_s=median("data_wait_s") or 0.0,
        memory_gib=median("memory_gib"),
        mfu=median("mfu"),
        final_loss=records[-1].loss,
    )
