"""Time and memory from the command to the first DDP step: warm start, cold start, plain torchrun.

    python benchmarks/startup.py --ranks 4 --rounds 3

The three take turns, round after round, so that a busy moment of the machine hits all of them. Every way does the same
work in every rank: the same imports, gloo, one step of DDP with AdamW. The time counts from the start of the command
to the end of the step on the slowest rank; the memory is the proportional set size (PSS), so that shared pages
are counted once, of all processes of the job while all ranks are alive. The CPU time of all of them up to then is the
number that a busy machine changes least.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

WAYS = ("warm", "cold", "torchrun")
IMPORTS = ("torch", "tokenizers", "datasets", "pyarrow")


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
    first_step(Path(payload), context.rank, context.world_size)


def run_launcher(start: str, nproc: int, folder: Path) -> int:
    """The launcher's own process."""
    import startup as module  # under this name the entry can be imported by a cold rank

    from model_check.launch import DEFAULT_PRELOAD, launch_job
    from model_check.rundir import RunDir

    result = launch_job(
        module.entry,
        str(folder),
        nproc=nproc,
        run_dir=RunDir.create(folder / "run"),
        start="warm" if start == "warm" else "cold",
        preload_modules=(*DEFAULT_PRELOAD, *IMPORTS),
    )
    shutil.rmtree(result.log_dir)
    return result.exit_code


def measure(way: str, nproc: int) -> dict[str, float]:
    """One start of one way: seconds to the first step, and MiB of the ranks and of the whole job."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here = [str(Path(__file__).resolve()), "--way", way, "--folder", name, "--ranks", str(nproc)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        command = [*torchrun, *here] if way == "torchrun" else [sys.executable, *here]
        path = os.pathsep.join(str(p) for p in (Path(__file__).resolve().parents[1], Path(__file__).resolve().parent))
        began = time.monotonic()
        job = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, stdout=subprocess.DEVNULL
        )
        files = [folder / f"rank-{rank}.json" for rank in range(nproc)]
        while not all(file.exists() for file in files):
            if job.poll() is not None:
                raise SystemExit(f"{way}: the job ended with {job.returncode} before its first step")
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
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way == "torchrun":
        return first_step(options.folder, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if options.way:
        sys.exit(run_launcher(options.way, options.ranks, options.folder))

    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            rounds[way].append(measure(way, options.ranks))
    medians = {
        way: {key: round(statistics.median(one[key] for one in runs), 2) for key in runs[0]}
        for way, runs in rounds.items()
    }
    print(f"{'':10}{'first step':>12}{'CPU time':>12}{'per rank':>12}{'whole job':>12}   (medians of {options.rounds})")
    for way, row in medians.items():
        times = f"{row['first_step_s']:>10.2f} s{row['cpu_s']:>10.2f} s"
        print(f"{way:10}{times}{row['rank_mib']:>8.0f} MiB{row['job_mib']:>8.0f} MiB")
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    file = results / f"{time.strftime('%Y-%m-%d')}-startup-{options.ranks}-cpu-ranks.json"
    import torch

    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    body = {"nproc": options.ranks, "imports": IMPORTS, **machine, "medians": medians, "rounds": rounds}
    file.write_text(json.dumps(body, indent=2) + "\n")
    print(f"written to {file}")
    return None


if __name__ == "__main__":
    main()
