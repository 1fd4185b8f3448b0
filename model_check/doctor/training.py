"""Stage train: a tiny model on one device, through the real trainer; its loss must fall."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from model_check.doctor.check import Check, failed, passed
from model_check.doctor.jobs import finished_job
from model_check.doctor.settings import Settings

STEPS = 12
LEAST_FALL = 0.5  # the loss falls by 3 in these steps on every machine tried
TINY = {
    "training.context_length": "64",
    "training.batch_size": "4",
    "training.learning_rate": "3e-3",
    "training.compile": "off",
    "checkpoint.interval": "0",
    "data.samples": "400",
    "logging.tensorboard": "false",
}


def check_training(settings: Settings) -> Iterator[Check]:
    gpu = settings.gpus[0] if settings.gpus else None
    name = f"train on GPU {gpu.index}" if gpu else "train on the CPU"
    sets = [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]
    place = ["--gpus", str(gpu.index)] if gpu else ["--nproc", "1", "--set", "system.device=cpu"]
    arguments = ["--preset", "debug", "--max-steps", str(STEPS), *place, *sets]
    with finished_job(settings.train, arguments, settings) as job:
        if job.problem:
            fix = "model-check train --preset debug --nproc 1 shows the whole story"
            yield failed(name, job.problem, fix)
            return
        yield judge_losses(name, [step.loss for step in job.metrics], job.answer.seconds)


def judge_losses(name: str, losses: Sequence[float], seconds: float) -> Check:
    fix = "do not train here: compare with another machine, and test memory and GPU of this one"
    if len(losses) < STEPS:
        return failed(name, f"{len(losses)} of {STEPS} steps were recorded", fix)
    if not all(math.isfinite(loss) for loss in losses):
        return failed(name, f"the loss is not finite: {losses[-1]}", fix)
    path = f"loss {losses[0]:.2f} → {losses[-1]:.2f} in {len(losses)} steps"
    if losses[0] - losses[-1] < LEAST_FALL:
        return failed(name, f"{path}: it does not fall", fix)
    return passed(name, f"{path}, {seconds:.1f} s from the command to the end")
