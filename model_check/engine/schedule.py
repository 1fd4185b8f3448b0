"""The learning rate of every step, as a pure function of the step."""

from __future__ import annotations

import math

from model_check.config.sections import SchedulerSection


def rate_factor(step: int, schedule: SchedulerSection, max_steps: int) -> float:
    """The share of the peak learning rate that step (0-based) trains with.

    Every schedule climbs linearly for `warmup_steps` and reaches 1 on the first step after them.
    """
    warmup_steps, min_ratio = schedule.warmup_steps, schedule.min_ratio
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule.type in ("constant", "linear_warmup"):
        return 1.0
    if schedule.type == "cosine":
        progress = (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps)
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    decay_steps = max(1, round(max_steps * schedule.decay_fraction))
    into_decay = step - (max_steps - decay_steps)
    if into_decay < 0:
        return 1.0
    return 1 - (1 - min_ratio) * min(1.0, (into_decay + 1) / decay_steps)
