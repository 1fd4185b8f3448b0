"""Time and memory from the command to the first DDP step: warm start, cold start, gate, plain torchrun.

    python benchmarks/startup.py --ranks 2 4 8 --rounds 3
    python benchmarks/startup.py --storm             8 ranks under a memory limit between what the ways need

The ways take turns, round after round, so that a busy moment of the machine hits all of them. Every way does the same
work in every rank: the same imports, gloo, one step of DDP with AdamW. The time counts from the start of the command
to the end of the step on the slowest rank; the memory is the proportional set size (PSS), so that shared pages
are counted once, of all processes of the job while all ranks are alive, and at its peak on the way there. The CPU time
of all of them up to then is the number that a busy machine changes least.

The storm runs each way once more under a limit for all its processes together (memory_warden.py plays the OOM killer):
half-way between the peaks of the warm start and of torchrun.

`model-check bench startup` times whole runs of the trainer instead, on the devices at hand, and no memory. The two
share no code: ranks run this very file, so what it imports is part of what it measures (the module behind the verb
alone is 0.2 s and 13 MiB in every rank).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from memory_warden import job_sizes, watch

WAYS = ("warm", "gate", "cold", "torchrun")
IMPORTS = ("torch", "tokenizers", "datasets", "pyarrow")
PEAK_EVERY_S = 0.2  # reading sizes costs time that the start itself needs
STORM_RANKS = 8


def first_step(folder: Path, rank: int, world_size: int) -> None:
    """One DDP step; leaves the moment of its end, then stays alive until the memory was measured."""
    for name in IMPORTS:
        importlib.import_module(name)
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    at = time.monotonic()
    (folder / f"rank-{rank}.tmp").write_text(json.dumps({"at": at, "pid": os.getpid()}))
    (folder / f"rank-{rank}.tmp").rename(folder / f"rank-{rank}.json")
    dist.barrier()
    while not (folder / "measured").exists():
        time.sleep(0.01)
    dist.destroy_process_group()


def entry(context: Any, payload: str) -> None:
    from model_check.blackbox.gate import Gate, GatePlan

    plan = GatePlan.from_environment(os.environ)
    if plan is not None:
        with Gate(plan, context.rank).passing():
            for name in IMPORTS:
                importlib.import_module(name)
    first_step(Path(payload), context.rank, context.world_size)


def run_launcher(start: Any, nproc: int, folder: Path) -> int:
    """The launcher's own process."""
    import startup as module  # under this name the entry can be imported by a cold rank

    from model_check.launch import DEFAULT_PRELOAD, launch_job
    from model_check.record import RunDir

    result = launch_job(
        module.entry,
        str(folder),
        nproc=nproc,
        run_dir=RunDir.create(folder / "run"),
        start=start,
        preload_modules=(*DEFAULT_PRELOAD, *IMPORTS),
    )
    shutil.rmtree(result.log_dir)
    return result.exit_code


def command_of(way: str, nproc: int, folder: str) -> tuple[list[str], dict[str, str]]:
    """The words and the environment that start one way."""
    here = [str(Path(__file__).resolve()), "--way", way, "--folder", folder, "--ranks", str(nproc)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    path = os.pathsep.join(str(p) for p in (Path(__file__).resolve().parents[1], Path(__file__).resolve().parent))
    command = [*torchrun, *here] if way == "torchrun" else [sys.executable, *here]
    return command, {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def measure(way: str, nproc: int) -> dict[str, float]:
    """One start of one way: seconds to the first step, and MiB of the ranks and of the whole job."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command, env = command_of(way, nproc, name)
        began = time.monotonic()
        job = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        files = [folder / f"rank-{rank}.json" for rank in range(nproc)]
        peak, look_at = 0.0, began
        while not all(file.exists() for file in files):
            if job.poll() is not None:
                raise SystemExit(f"{way}: the job ended with {job.returncode} before its first step")
            if time.monotonic() >= look_at:
                peak, look_at = max(peak, sum(job_sizes(job.pid).values()) / 2**20), time.monotonic() + PEAK_EVERY_S
            time.sleep(0.01)
        ranks = [json.loads(file.read_text()) for file in files]
        pids = {rank["pid"] for rank in ranks}
        whole = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        sizes = {process.pid: process.memory_full_info().pss / 2**20 for process in whole}
        cpu_s = sum(sum(process.cpu_times()[:2]) for process in whole)
        (folder / "measured").touch()
        if job.wait() != 0:
            raise SystemExit(f"{way}: the job ended with {job.returncode}")
    return {
        "first_step_s": max(rank["at"] for rank in ranks) - began,
        "cpu_s": cpu_s,
        "rank_mib": statistics.mean(sizes[pid] for pid in pids),
        "job_mib": sum(sizes.values()),
        "peak_mib": max(peak, sum(sizes.values())),
    }


def table(nproc: int, rounds: int) -> dict[str, Any]:
    """All ways in turns; prints their medians and returns everything."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            runs[way].append(measure(way, nproc))
    medians = {
        way: {key: round(statistics.median(one[key] for one in rows), 2) for key in rows[0]}
        for way, rows in runs.items()
    }
    print(f"{nproc} ranks    {'first step':>12}{'CPU time':>12}{'per rank':>12}{'whole job':>12}{'peak':>12}")
    for way, row in medians.items():
        times = f"{row['first_step_s']:>10.2f} s{row['cpu_s']:>10.2f} s"
        print(f"{way:11}{times}{row['rank_mib']:>8.0f} MiB{row['job_mib']:>8.0f} MiB{row['peak_mib']:>8.0f} MiB")
    return {"nproc": nproc, "medians": medians, "rounds": runs}


def storm(nproc: int) -> dict[str, Any]:
    """Every way under a limit that the warm start keeps and torchrun does not."""
    peaks = {way: measure(way, nproc)["peak_mib"] for way in ("warm", "torchrun")}
    limit = (peaks["warm"] + peaks["torchrun"]) / 2
    outcomes: dict[str, Any] = {}
    for way in ("torchrun", "gate", "warm"):
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "measured").touch()
            command, env = command_of(way, nproc, name)
            seen = watch(command, int(limit * 2**20), env)
            outcomes[way] = {"exit_code": seen.exit_code, "peak_mib": seen.peak_mib, "killed": len(seen.kills)}
        end = "passed" if seen.exit_code == 0 else f"killed at {seen.peak_mib:.0f} MiB"
        print(f"{nproc} ranks under {limit:.0f} MiB, {way:9} {end}")
    return {"nproc": nproc, "limit_mib": limit, "peaks_mib": peaks, "outcomes": outcomes}


def write(name: str, body: dict[str, Any]) -> None:
    from result_file import result_path, write_result  # not in the ranks, where each import is measured

    write_result(result_path(name), {"imports": IMPORTS, **body}, IMPORTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--storm", action="store_true", help="8 ranks under a tight memory limit")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way == "torchrun":
        first_step(options.folder, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    elif options.way:
        sys.exit(run_launcher(options.way, options.ranks[0], options.folder))
    elif options.storm:
        write("startup-storm-8-cpu-ranks", storm(STORM_RANKS))
    else:
        for nproc in options.ranks:
            write(f"startup-{nproc}-cpu-ranks", table(nproc, options.rounds))


if __name__ == "__main__":
    main()
