"""What the black box and the numerics guard cost: the step time of a DDP script with and without them, in turns.

    python benchmarks/blackbox_overhead.py                                 two gloo ranks on the CPU
    python benchmarks/blackbox_overhead.py --device cuda                   one rank on a GPU, a small batch in fp32
    python benchmarks/blackbox_overhead.py --device cuda --model llama     a transformer in bf16
    python benchmarks/blackbox_overhead.py --device cuda --waits           a script that waits for its GPU in every step
    python benchmarks/blackbox_overhead.py --device cuda --guard full      all gradients are read in every step

The script is `steps_in_turns.py`: blocks of steps without anything, with the black box alone, and with the guard as
well, as `model-check run` has it. Neighbouring blocks see the same machine, so each round gives ratios of mean steps;
the result is the median ratio with its 95 % interval. CPU time is given too: where other programs share the machine,
wall time tells more about them. At the end each hook is called by itself, with and without us, so that it is known
where the time goes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from result_file import result_path, write_result

from model_check.blackbox.recorder import PHASE, Put, Recorder
from model_check.numerics.bootstrap import inject_path
from model_check.record import RunDir
from model_check.record.ring import BEGIN, kind

STEPS = Path(__file__).with_name("steps_in_turns.py")
WITHOUT, BOX, GUARD = "without", "box", "guard"


@dataclass(frozen=True)
class Shape:
    """The script's model, and how its steps are cut into blocks."""

    model: str
    device: str
    ranks: int
    width: int
    depth: int
    batch: int
    length: int  # tokens in a row; of no meaning to the small model
    rounds: int
    steps: int
    dropped: int = 3  # steps after a switch
    waits: bool = False  # for the GPU, in every step
    guard: str = "observe"  # or another of its modes

    def arguments(self) -> list[str]:
        numbers = (self.width, self.depth, self.batch, self.length, self.rounds, self.steps, self.dropped)
        return [self.model, self.device, *map(str, numbers), str(int(self.waits))]


@dataclass(frozen=True)
class Measured:
    """What rank 0 saw. A turn has the (wall, CPU) seconds of the mean step of each block."""

    turns: list[dict[str, tuple[float, float]]]
    records_per_step: float
    parameters: int
    hooks_us: dict[str, float]

    def ratios(self, level: str, against: str, *, cpu: bool = False) -> list[float]:
        return [turn[level][cpu] / turn[against][cpu] for turn in self.turns]

    def step_ms(self, level: str) -> float:
        return statistics.median(turn[level][0] for turn in self.turns) * 1e3


def measure(shape: Shape) -> Measured:
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = RunDir.create(Path(scratch, "run"))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        path = os.pathsep.join(filter(None, (inject_path(), os.environ.get("PYTHONPATH"))))
        env |= {"MODEL_CHECK_RUN_DIR": str(run_dir.root), "PYTHONPATH": path, "WORLD_SIZE": str(shape.ranks)}
        env["MODEL_CHECK_GUARD"] = shape.guard
        ranks = [
            subprocess.Popen(
                [sys.executable, str(STEPS), *shape.arguments()],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(shape.ranks)
        ]
        said = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"a rank failed: exit codes {[rank.returncode for rank in ranks]}")
    return Measured(**json.loads(said[0].strip().splitlines()[-1]))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def record_cost_us(repeats: int = 50, records: int = 2000) -> float:
    """One record, at best: the rest of the machine only ever adds."""
    with tempfile.TemporaryDirectory() as folder:
        put = Recorder(Path(folder, "r.ring"), rank=0).put
        best = min(_seconds(put, kind(BEGIN, PHASE["forward"]), records) for _ in range(repeats))
    return best / records * 1e6


def _seconds(put: Put, what: int, records: int) -> float:
    start = time.perf_counter()
    for _ in range(records):
        put(what, 1, 12, 2)
    return time.perf_counter() - start


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Where the true median lies with 95 % certainty, by rank: assumes nothing about the noise."""
    ordered = sorted(ratios)
    half, reach = (len(ordered) - 1) / 2, 0.98 * math.sqrt(len(ordered))
    return ordered[max(0, math.floor(half - reach))], ordered[min(len(ordered) - 1, math.ceil(half + reach))]


def _spread(ratios: Sequence[float]) -> str:
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.4f} (95 %: {low:.4f} to {high:.4f})"


def _shape(options: argparse.Namespace) -> Shape:
    how = {"rounds": options.rounds, "steps": options.steps, "waits": options.waits, "guard": options.guard}
    if options.model == "llama":
        width, depth, batch, length = (4096, 4, 4, 2048) if options.device == "cuda" else (128, 2, 2, 64)
    else:
        width, depth, batch, length = (2048, 8, 1024, 0) if options.device == "cuda" else (256, 4, 64, 0)
    ranks = 1 if options.device == "cuda" else 2
    return Shape(options.model, options.device, ranks, width, depth, options.batch or batch, length, **how)


def _result(shape: Shape, seen: Measured) -> dict[str, object]:
    compared = {"box": (BOX, WITHOUT), "guard": (GUARD, BOX), "both": (GUARD, WITHOUT)}
    ratios = {
        name: {
            "median": statistics.median(seen.ratios(*levels)),
            "interval": interval(seen.ratios(*levels)),
            "cpu_median": statistics.median(seen.ratios(*levels, cpu=True)),
            "cpu_interval": interval(seen.ratios(*levels, cpu=True)),
        }
        for name, levels in compared.items()
    }
    return {
        "shape": asdict(shape),
        "parameters": seen.parameters,
        "step_ms": {level: seen.step_ms(level) for level in (WITHOUT, BOX, GUARD)},
        "ratios": ratios,
        "hooks_us": seen.hooks_us,
        "records_per_step": seen.records_per_step,
        "record_us": record_cost_us(),
        "turns": seen.turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=("mlp", "llama"), default="mlp")
    parser.add_argument("--batch", type=int, help="rows in a step (default 64, on a GPU 1024; transformer: 2 and 4)")
    parser.add_argument("--rounds", type=int, default=30, help="blocks of each kind, in turns (default 30)")
    parser.add_argument("--steps", type=int, default=20, help="steps in a block (default 20)")
    parser.add_argument("--waits", action="store_true", help="the script waits for its GPU in every step")
    parser.add_argument("--guard", choices=("observe", "full"), default="observe", help="as of model-check run")
    parser.add_argument("--out", type=Path, help="the file to write; by default one of today in benchmarks/results")
    options = parser.parse_args()
    shape = _shape(options)
    seen = measure(shape)
    result = _result(shape, seen)
    print(
        f"a step without anything: {seen.step_ms(WITHOUT):.3f} ms, {shape.ranks} ranks, {seen.parameters:,} parameters"
    )
    for name, levels in (("black box", (BOX, WITHOUT)), ("guard", (GUARD, BOX)), ("both", (GUARD, WITHOUT))):
        print(f"{name:10s} wall {_spread(seen.ratios(*levels))}   CPU time {_spread(seen.ratios(*levels, cpu=True))}")
    print(f"{seen.records_per_step:.0f} records a step, {result['record_us']:.2f} us each")
    for hook, microseconds in seen.hooks_us.items():
        print(f"  {hook:32s} {microseconds:6.1f} us")
    variants = f"-batch-{options.batch}" * bool(options.batch) + "-waits" * options.waits
    variants += "-full" * (options.guard == "full")
    what = f"{options.device}-{options.model}{variants}"
    write_result(options.out or result_path(f"blackbox-overhead-{what}"), result)


if __name__ == "__main__":
    main()
