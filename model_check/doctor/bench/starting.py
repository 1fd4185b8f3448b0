"""Seconds from the command to the first step, for each way to start the same ranks."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model_check.doctor.bench.training import QUIET
from model_check.doctor.jobs import finished_job
from model_check.doctor.settings import Settings
from model_check.errors import LaunchError

WAYS = ("warm", "gate", "cold", "torchrun")
TINY = ("training.context_length=64", "training.batch_size=2", "data.samples=200", "training.compile=off", *QUIET)


@dataclass(frozen=True)
class Start:
    """One way: the seconds of each round, from the command to the end of the first step."""

    way: str
    ranks: int
    rounds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds)


def measure_starts(settings: Settings, ways: Sequence[str], ranks: int, rounds: int) -> Iterator[Start]:
    """The ways take turns, round after round, so that a busy moment of the machine hits all of them."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            seconds[way].append(_first_step_s(settings, way, ranks))
    for way, values in seconds.items():
        yield Start(way, ranks, tuple(values))


def _first_step_s(settings: Settings, way: str, ranks: int) -> float:
    sets = [word for value in TINY for word in ("--set", value)]
    arguments = ["--preset", "debug", "--max-steps", "1", *sets]
    if way == "torchrun":
        launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        command = (*launcher, *settings.train[1:])
    else:
        command = settings.train
        arguments += ["--nproc", str(ranks), "--set", f"launch.start={way}"]
    began = time.time()
    with finished_job(command, arguments, settings) as job:
        if job.problem:
            raise LaunchError(f"{way}: {job.problem}", remedy="leave it out with --ways, or run doctor --only ranks")
        # The only record of a run of one step is written when that step has ended.
        return (job.run_dir / "metrics.jsonl").stat().st_mtime - began
