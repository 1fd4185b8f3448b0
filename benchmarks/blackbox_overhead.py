"""What the black box costs: the step time of a plain DDP script with it and without it, in turns.

    python benchmarks/blackbox_overhead.py                    two gloo ranks on the CPU
    python benchmarks/blackbox_overhead.py --device cuda      one rank on a GPU

Each turn is a fresh set of processes; turns with and without alternate, so that a drift of the machine hits both.
A turn's number is the median of its steps; the result is the median of the ratios of neighbouring turns. On a machine
that is busy with other things look at CPU time: wall time then tells more about the neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from model_check.observe import inject_path
from model_check.observe.recorder import PHASE, Recorder
from model_check.rundir import RunDir
from model_check.rundir.ring import BEGIN, kind, read_ring

SCRIPT = """\
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

device, width, depth, batch, steps, warmup = sys.argv[1], *map(int, sys.argv[2:7])
on_gpu = device == "cuda"
dist.init_process_group("nccl" if on_gpu else "gloo")
torch.manual_seed(0)
layers = [(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)) for _ in range(depth)]
net = DDP(torch.nn.Sequential(*[layer for block in layers for layer in block]).to(device))
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
data = TensorDataset(torch.randn(batch * (steps + warmup), width))
times, cpu, loss = [], [], None
for (x,) in DataLoader(data, batch_size=batch):
    start, start_cpu = time.perf_counter(), time.process_time()
    loss = net(x.to(device)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    if on_gpu:
        torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
    cpu.append(time.process_time() - start_cpu)
print(json.dumps({"times": times[warmup:], "cpu": cpu[warmup:], "loss": loss.item()}))
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Shape:
    """The script's model and how long it runs."""

    device: str
    ranks: int
    width: int
    depth: int
    batch: int
    steps: int
    warmup: int

    def arguments(self) -> list[str]:
        return [self.device, *(str(n) for n in (self.width, self.depth, self.batch, self.steps, self.warmup))]


@dataclass(frozen=True)
class Turn:
    """One set of processes: rank 0's median step, in wall and in CPU time, its loss, and its records per step."""

    step_s: float
    cpu_s: float
    loss: float
    records_per_step: float


def run_turn(shape: Shape, folder: Path, with_box: bool) -> Turn:
    run_dir = RunDir.create(tempfile.mkdtemp(dir=folder))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    if with_box:
        env |= {"MODEL_CHECK_RUN_DIR": str(run_dir.root), "PYTHONPATH": inject_path()}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(folder / "train.py"), *shape.arguments()],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(shape.ranks)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(shape.ranks)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: exit codes {[rank.returncode for rank in ranks]}")
    told = json.loads(said[0].strip().splitlines()[-1])
    crumbs = read_ring(run_dir.ring(0)).crumbs if with_box else []
    steps = max((c.step for c in crumbs), default=0) - min((c.step for c in crumbs), default=0)
    wall, cpu = statistics.median(told["times"]), statistics.median(told["cpu"])
    return Turn(wall, cpu, told["loss"], len(crumbs) / steps if steps else 0.0)


def _compared(off_s: float, on_s: float) -> str:
    return f"{off_s * 1e3:>9.3f} ms {on_s * 1e3:>9.3f} ms {on_s / off_s:>8.4f}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def record_cost_us(repeats: int = 50, records: int = 2000) -> float:
    """One record, at best: the rest of the machine only ever adds."""
    with tempfile.TemporaryDirectory() as folder:
        put = Recorder(Path(folder, "r.ring"), rank=0).put
        what = kind(BEGIN, PHASE["forward"])
        best = min(_seconds(put, what, records) for _ in range(repeats))
    return best / records * 1e6


def _seconds(put: object, what: int, records: int) -> float:
    start = time.perf_counter()
    for _ in range(records):
        put(what, 1, 12, 2)  # type: ignore[operator]
    return time.perf_counter() - start


def _hardware(device: str) -> dict[str, object]:
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {"gpu": gpu, "cpus": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=5, help="turns with and without, alternating (default 5)")
    parser.add_argument("--steps", type=int, default=0, help="measured steps a turn (default 60 on CPU, 200 on GPU)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    shape = (
        Shape("cuda", 1, width=2048, depth=8, batch=1024, steps=options.steps or 200, warmup=20)
        if options.device == "cuda"
        else Shape("cpu", 2, width=256, depth=4, batch=64, steps=options.steps or 60, warmup=5)
    )
    pairs: list[tuple[Turn, Turn]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "train.py").write_text(SCRIPT)
        print(f"{'turn':>4} {'without':>12} {'with':>12} {'ratio':>8} {'CPU without':>12} {'with':>12} {'ratio':>8}")
        for number in range(options.pairs):
            order = (False, True) if number % 2 == 0 else (True, False)
            turns = {with_box: run_turn(shape, folder, with_box) for with_box in order}
            pairs.append((turns[False], turns[True]))
            off, on = pairs[-1]
            print(f"{number + 1:>4} {_compared(off.step_s, on.step_s)} {_compared(off.cpu_s, on.cpu_s)}")
    ratios = [on.step_s / off.step_s for off, on in pairs]
    cpu_ratios = [on.cpu_s / off.cpu_s for off, on in pairs]
    cost = record_cost_us()
    records = statistics.median(on.records_per_step for _, on in pairs)
    step_us = statistics.median(off.step_s for off, _ in pairs) * 1e6
    same_losses = len({turn.loss for pair in pairs for turn in pair}) == 1
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": _hardware(options.device),
        "shape": asdict(shape),
        "median_ratio": statistics.median(ratios),
        "ratios": ratios,
        "median_cpu_ratio": statistics.median(cpu_ratios),
        "cpu_ratios": cpu_ratios,
        "step_ms_without": [off.step_s * 1e3 for off, _ in pairs],
        "step_ms_with": [on.step_s * 1e3 for _, on in pairs],
        "records_per_step": records,
        "record_us": cost,
        "records_share_of_step": records * cost / step_us,
        "losses_identical": same_losses,
    }
    print(f"median ratio {statistics.median(ratios):.4f} (from {min(ratios):.4f} to {max(ratios):.4f})")
    print(f"in CPU time  {statistics.median(cpu_ratios):.4f} (from {min(cpu_ratios):.4f} to {max(cpu_ratios):.4f})")
    print(f"{records:.1f} records a step at {cost:.2f} us: {100 * records * cost / step_us:.3f} % of a step")
    print(f"losses identical to the last digit: {'yes' if same_losses else 'NO'}")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"blackbox_overhead_{options.device}_{time.strftime('%Y%m%d')}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
