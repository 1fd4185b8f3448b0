"""What the numerics guard costs in every step: our train step with it and without it, in turns within one run.

    python benchmarks/guard_overhead.py                           one rank and two gloo ranks on the CPU
    python benchmarks/guard_overhead.py --device cuda             a Llama of 4 layers of the 8B shape on one GPU
    python benchmarks/guard_overhead.py --device cuda --layers 32 all of it
    torchrun --nproc_per_node 8 benchmarks/guard_overhead.py --device cuda --ranks env     one rank of a job

"On" is what every run does: the check of each gradient before its exchange, the flag, keeping the step's random state.
"Off" is the same step without them. Blocks of steps alternate, neighbouring blocks see the same machine, and each pair
gives a ratio; the result is the median ratio with its 95 % interval. A lone rank exchanges nothing and has no check of
its own gradients: to show on one GPU what the check costs a rank of a job, `--replica` puts the lone rank's model into
DDP, which then exchanges its buckets with nobody.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.multiprocessing as mp
from blackbox_overhead import interval
from result_file import write_result
from torch.nn.parallel import DistributedDataParallel

from model_check.config import Config, load_config
from model_check.engine.arrangement import Arranged, arrange_llama
from model_check.engine.inputs import RandomState
from model_check.engine.optimizer import build_optimizer
from model_check.engine.passes import WholeModel, pin_buckets
from model_check.engine.place import Place, join, join_alone, leave
from model_check.engine.step import TrainStep
from model_check.numerics.finite import LocalCheck, watch_replica


@dataclass(frozen=True)
class Result:
    """Median over the pairs of blocks."""

    device: str
    ranks: int
    parameters: int
    step_ms_off: float
    step_ms_on: float
    overhead_percent: float
    interval_percent: tuple[float, float]  # where the true median lies with 95 % certainty, by rank
    cpu_overhead_percent: float
    pairs: int
    steps_per_block: int
    local_check: bool


def settings(options: argparse.Namespace) -> Config:
    """On a GPU the shape of the 8B model, as production trains it; on the CPU something small."""
    on_gpu = options.device == "cuda"
    small = ["model.hidden_size=256", "model.intermediate_size=768"]
    return load_config(
        preset="production" if on_gpu else "debug",
        overrides=[
            *(["training.precision=bf16"] if on_gpu else small),
            f"model.num_layers={options.layers}",
            f"training.context_length={options.context}",
            f"training.batch_size={options.batch}",
            "parallel.strategy=ddp",
        ],
    )


def build(config: Config, arranged: Arranged, place: Place) -> TrainStep:
    return TrainStep(
        arranged.model,
        build_optimizer(arranged.bare_model, config.training),
        arranged.precision,
        place,
        max_grad_norm=1.0,
        passes=arranged.passes,
        norm_of=arranged.norm_of,
        losses_in_job=arranged.losses_in_job,
        local_check=arranged.local_check,
    )


def switch(step: TrainStep, on: bool, check: LocalCheck | None) -> None:
    """The check is still told of each bucket; switched off, it returns at once and the step asks nothing."""
    step._local_check = check if on else None
    step.holds_after_hit = on
    if check is not None:
        check.close()


def as_replica(arranged: Arranged, device: torch.device) -> Arranged:
    """What a rank of a job has: its model in DDP, and each bucket looked at on its way into the exchange."""
    whole = DistributedDataParallel(arranged.bare_model, gradient_as_bucket_view=True)
    pin_buckets(whole)
    passes = WholeModel(whole, arranged.precision, device)
    return replace(arranged, model=whole, passes=passes, local_check=watch_replica(device))


def measure(options: argparse.Namespace, rank: int, ranks: int) -> Result | None:
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    place = Place(rank, ranks, device)
    torch.set_num_threads(1)
    config = settings(options)
    join(place, config)
    vocabulary = 128256 if options.device == "cuda" else 4096
    arranged = arrange_llama(config, place, vocabulary)
    if options.replica and ranks == 1:
        join_alone(place)
        arranged = as_replica(arranged, device)
    step = build(config, arranged, place)
    check = arranged.local_check
    tokens = torch.randint(0, 4096, (options.batch, options.context + 1), device=device)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def block(on: bool) -> tuple[float, float]:
        switch(step, on, check)
        return timed(step, batch, options.steps, device, keeps_state=on)

    block(True), block(False)
    pairs = []
    for number in range(options.pairs):
        # Alternating the order keeps a machine that warms up, or slows down, from favouring one of them.
        first, second = block(number % 2 == 0), block(number % 2 == 1)
        on, off = (first, second) if number % 2 == 0 else (second, first)
        pairs.append((on, off))
    result = None
    if rank == 0:
        ratios = sorted(on[0] / off[0] for on, off in pairs)
        low, high = interval(ratios)
        result = Result(
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
            ranks=ranks,
            parameters=sum(p.numel() for p in arranged.bare_model.parameters()),
            step_ms_off=1e3 * statistics.median(off[0] for _, off in pairs),
            step_ms_on=1e3 * statistics.median(on[0] for on, _ in pairs),
            overhead_percent=100 * (statistics.median(ratios) - 1),
            interval_percent=(100 * (low - 1), 100 * (high - 1)),
            cpu_overhead_percent=100 * (statistics.median(on[1] / off[1] for on, off in pairs) - 1),
            pairs=options.pairs,
            steps_per_block=options.steps,
            local_check=check is not None,
        )
    leave()
    return result


def timed(
    step: Callable[..., object], batch: object, steps: int, device: torch.device, *, keeps_state: bool
) -> tuple[float, float]:
    """Seconds of wall time and of this process's CPU time, per step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start, start_cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        if keeps_state:
            RandomState.capture(device)
        step([batch], 1e-6)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps, (time.process_time() - start_cpu) / steps


def _worker(rank: int, options: argparse.Namespace, ranks: int, port: int, answers: mp.SimpleQueue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    result = measure(options, rank, ranks)
    if result is not None:
        answers.put(result)


def on_ranks(options: argparse.Namespace, ranks: int) -> Result:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_worker, args=(options, ranks, port, answers), nprocs=ranks)
    result: Result = answers.get()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", default="1", help="numbers of ranks, comma-separated; env: this is one of a job")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=None, help="default: 8192 on a GPU, 128 on the CPU")
    parser.add_argument("--batch", type=int, default=None, help="default: 2 on a GPU, 4 on the CPU")
    parser.add_argument("--steps", type=int, default=5, help="in a block")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--replica", action="store_true", help="put a lone rank into DDP, as a rank of a job is")
    parser.add_argument("--out", type=Path, default=None, help="write the results here, as JSON")
    options = parser.parse_args()
    options.context = options.context or (8192 if options.device == "cuda" else 128)
    options.batch = options.batch or (2 if options.device == "cuda" else 4)
    if options.ranks == "env":
        own = measure(options, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        results = [own] if own is not None else []
    else:
        results = [on_ranks(options, int(number)) for number in options.ranks.split(",")]
    for result in results:
        print(json.dumps(asdict(result)))
    if options.out is not None and results:
        write_result(options.out, {"results": [asdict(result) for result in results]})


if __name__ == "__main__":
    main()
