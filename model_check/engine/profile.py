"""A torch profiler window over a few steps: a trace that TensorBoard and Perfetto open, and what it says in words.

profile/rank0.….pt.trace.json     the trace
profile/rank0.summary.json        shares of the step, and the first thing to change
profile/rank0.communication.json  count, bytes, time and bandwidth of every kind of collective, over the whole run
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from model_check.blackbox.communication_profiler import CommunicationProfiler
from model_check.engine.trace_summary import DATA_WAIT, summarize
from model_check.record import write_json_atomic

# The first step compiles and allocates; a trace of it describes no other step.
SKIPPED_STEPS = 2
TRACED_STEPS = 3


@contextlib.contextmanager
def profiled(
    folder: Path | None, rank: int = 0, say: Callable[[str], None] = lambda line: None
) -> Iterator[Callable[[], None]]:
    """Yields what is to be called after every step; without a folder nothing is traced."""
    if folder is None:
        yield lambda: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    export = torch.profiler.tensorboard_trace_handler(str(folder), worker_name=f"rank{rank}")
    done = 0

    def on_trace_ready(profiler: torch.profiler.profile) -> None:
        if done > SKIPPED_STEPS:
            with _told(say):
                export(profiler)
                _explain(folder, rank, done, say)

    with (
        CommunicationProfiler(enabled=torch.distributed.is_initialized()) as communication,
        torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=TRACED_STEPS, repeat=1),
            on_trace_ready=on_trace_ready,
        ) as profiler,
    ):

        def step_done() -> None:
            nonlocal done
            done += 1
            communication.step()
            profiler.step()

        yield step_done
        if done <= SKIPPED_STEPS:
            say(
                f"profile: nothing was traced in {done} step{'s' if done != 1 else ''}, since the first "
                f"{SKIPPED_STEPS} describe no other; train {SKIPPED_STEPS + TRACED_STEPS} steps or more"
            )
        if communication.enabled:
            with _told(say):
                write_json_atomic(folder / f"rank{rank}.communication.json", communication.get_stats().to_dict())


@contextlib.contextmanager
def _told(say: Callable[[str], None]) -> Iterator[None]:
    """A full disk costs the trace, not the training."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        say(f"profile: the trace cannot be written ({error}); training goes on")


def _explain(folder: Path, rank: int, steps_done: int, say: Callable[[str], None]) -> None:
    trace = max(folder.glob(f"rank{rank}.*.pt.trace.json"), key=lambda path: path.stat().st_mtime)
    summary = summarize(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"], steps_done)
    if summary is not None:
        write_json_atomic(folder / f"rank{rank}.summary.json", summary.to_dict())
        say(f"profile: {summary.words()}")
    say(f"profile: {trace} (tensorboard --logdir {folder}, or ui.perfetto.dev)")


def named_waits(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches; the wait for each has a name in the trace."""
    iterator = iter(batches)
    while True:
        with torch.profiler.record_function(DATA_WAIT):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch
