"""A torch profiler window over a few steps, as a trace that TensorBoard and Perfetto open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

# The first step compiles and allocates; a trace of it describes no other step.
SKIPPED_STEPS = 2
TRACED_STEPS = 3


@contextlib.contextmanager
def profiled(folder: Path | None) -> Iterator[Callable[[], None]]:
    """Yields what is to be called after every step; without a folder nothing is traced."""
    if folder is None:
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=TRACED_STEPS, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder)),
    ) as profiler:
        yield profiler.step
