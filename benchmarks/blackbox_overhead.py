"""What the black box costs: the step time of a DDP script with it and without it, in turns within one run.

    python benchmarks/blackbox_overhead.py                    two gloo ranks on the CPU
    python benchmarks/blackbox_overhead.py --device cuda      one rank on a GPU
    python benchmarks/blackbox_overhead.py --device cuda --waits     a script that waits for its GPU in every step
    python benchmarks/blackbox_overhead.py --guard off        without the numerics guard, which `run` has on

The script runs blocks of steps; before every other block its ranks switch the black box off: nothing is recorded, and
the dispatcher's kernels and the wrappers of the hot path are taken out. The first steps after a switch are dropped: the
interpreter fills its caches again. Neighbouring blocks see the same machine, so each pair gives a ratio of mean steps;
the result is the median ratio with its 95 % interval. CPU time is given too: where other programs share the machine,
wall time tells more about them. At the end each hook is called by itself, with and without us, so that it is known
where the time goes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from model_check.observe import inject_path
from model_check.observe.recorder import PHASE, Put, Recorder
from model_check.rundir import RunDir
from model_check.rundir.ring import BEGIN, kind

SCRIPT = """\
import inspect, json, sys, time
import torch
import torch.distributed as dist
from torch.optim import optimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from model_check.observe.instrument import native
from model_check.observe.instrument.box import BOX
from model_check.observe.instrument.now import HERE
from model_check.observe.instrument.steps import of_this_thread

device, width, depth, batch, pairs, steps, dropped, waits = sys.argv[1], *map(int, sys.argv[2:9])
on_gpu = device == "cuda"
dist.init_process_group("nccl" if on_gpu else "gloo")
torch.manual_seed(0)
layers = [(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)) for _ in range(depth)]
net = DDP(torch.nn.Sequential(*[layer for block in layers for layer in block]).to(device))
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
data = TensorDataset(torch.randn(batch * (steps + dropped), width))
recorder, budget = BOX.recorder, of_this_thread().guard._own._budget
wrapped = [(torch.nn.Module, "__call__"), (torch.autograd, "backward"), (_BaseDataLoaderIter, "__next__")]
wrapped += [(torch.distributed.distributed_c10d, "all_reduce")]
wrapped = [(owner, name, getattr(owner, name)) for owner, name in wrapped]
hook_tables = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
optimizer_hooks = [(hooks, key, hook) for hooks in hook_tables for key, hook in hooks.items()]


def nothing(*_):
    pass


def switch(on):
    BOX.recorder = recorder if on else None
    native.install() if on else native.uninstall()
    for owner, name, function in wrapped:
        setattr(owner, name, function if on else inspect.unwrap(function))
    for hooks, key, hook in optimizer_hooks:
        hooks[key] = hook if on else nothing
    budget._since = time.perf_counter()  # nothing is earned while it is off


def block():
    # The mean: where looking at all gradients is dear, it is done in some of the steps.
    for number, (x,) in enumerate(DataLoader(data, batch_size=batch)):
        if number == dropped:
            settle()
            start, start_cpu = time.perf_counter(), time.process_time()
        loss = net(x.to(device)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if waits:
            settle()
    settle()
    return (time.perf_counter() - start) / steps, (time.process_time() - start_cpu) / steps


def settle():
    if on_gpu:
        torch.cuda.synchronize()


def best(call, calls=20, repeats=40):
    # CPU time of this thread, at best: the rest of the machine only ever adds.
    seconds = []
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(calls):
            call()
        seconds.append(time.thread_time() - start)
    return min(seconds) / calls * 1e6


def forever():
    while True:
        yield one


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return forever()


one = torch.ones(8, requires_grad=True)
nested = torch.nn.Sequential(*[torch.nn.Identity() for _ in range(20)])
batches = iter(DataLoader(Endless(), batch_size=None))
message = torch.ones(8, device=device)
world = dist.distributed_c10d._get_default_group()


def outermost_forward():
    HERE.now.forwards_left = 64
    nested[0](one)


def nested_forward():
    HERE.now.forwards_left = 64
    nested(one)


small = torch.nn.Linear(8, 8)
small_optimizer = torch.optim.SGD(small.parameters(), lr=0.0)


def small_step():
    small(one.detach()).sum().backward()
    small_optimizer.step()
    small_optimizer.zero_grad()


HOOKS = {
    "forward of the outermost module": outermost_forward,
    "twenty modules inside one": nested_forward,
    "backward": lambda: torch.autograd.backward(one.sum()),
    "next of a loader": lambda: next(batches),
    "collective from Python": lambda: dist.distributed_c10d.all_reduce(message),
    "collective from C++": lambda: world.allreduce([message]).wait(),
    "a whole step without collectives": small_step,
}


def costs():
    found = {}
    for name, call in HOOKS.items():
        rounds = []
        for on in (True, False, True, False):
            switch(on)
            rounds.append(best(call))
        found[name] = min(rounds[0::2]) - min(rounds[1::2])
    switch(True)
    return found


switch(True)
first = recorder.point("step")
block()
records = (recorder.point("step") - first - 1) / (steps + dropped)
budget._left_s = 0.0  # what is advanced for the first steps of a run has been spent
turns = []
for number in range(pairs):
    pair = {}
    for on in (False, True) if number % 2 else (True, False):
        switch(on)
        pair["with" if on else "without"] = block()
    turns.append(pair)
print(json.dumps({"turns": turns, "records_per_step": records, "costs": costs()}))
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Shape:
    """The script's model, and how its steps are cut into blocks."""

    device: str
    ranks: int
    width: int
    depth: int
    batch: int
    pairs: int
    steps: int
    dropped: int = 3  # steps after a switch
    waits: bool = False  # for the GPU, in every step

    def arguments(self) -> list[str]:
        numbers = (self.width, self.depth, self.batch, self.pairs, self.steps, self.dropped, int(self.waits))
        return [self.device, *map(str, numbers)]


@dataclass(frozen=True)
class Measured:
    """(wall, CPU) seconds of the mean step of each block on rank 0, records a step, microseconds of each hook."""

    without: list[tuple[float, float]]
    with_box: list[tuple[float, float]]
    records_per_step: float
    hooks_us: dict[str, float]

    def ratios(self, clock: int) -> list[float]:
        return [on[clock] / off[clock] for off, on in zip(self.without, self.with_box, strict=True)]


def measure(shape: Shape, guard: str) -> Measured:
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch, "train.py")
        script.write_text(SCRIPT)
        run_dir = RunDir.create(Path(scratch, "run"))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        env |= {"MODEL_CHECK_RUN_DIR": str(run_dir.root), "PYTHONPATH": inject_path(), "WORLD_SIZE": str(shape.ranks)}
        env["MODEL_CHECK_GUARD"] = guard
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), *shape.arguments()],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(shape.ranks)
        ]
        said = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"a rank failed: exit codes {[rank.returncode for rank in ranks]}")
    told = json.loads(said[0].strip().splitlines()[-1])
    return Measured(
        [(turn["without"][0], turn["without"][1]) for turn in told["turns"]],
        [(turn["with"][0], turn["with"][1]) for turn in told["turns"]],
        told["records_per_step"],
        told["costs"],
    )


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


def _hardware(device: str) -> dict[str, object]:
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    load = os.getloadavg()[0]
    return {"gpu": gpu, "cpus": os.cpu_count(), "load": load, "machine": platform.machine(), "torch": torch.__version__}


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Where the true median lies with 95 % certainty, by rank: assumes nothing about the noise."""
    ordered = sorted(ratios)
    half, reach = (len(ordered) - 1) / 2, 0.98 * math.sqrt(len(ordered))
    return ordered[max(0, math.floor(half - reach))], ordered[min(len(ordered) - 1, math.ceil(half + reach))]


def _spread(ratios: Sequence[float]) -> str:
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.4f} (95 %: {low:.4f} to {high:.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=30, help="blocks with and without, in turns (default 30)")
    parser.add_argument("--steps", type=int, default=20, help="steps in a block (default 20)")
    parser.add_argument("--guard", choices=("observe", "off"), default="observe", help="the numerics guard")
    parser.add_argument("--waits", action="store_true", help="the script waits for its GPU in every step")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    how = {"pairs": options.pairs, "steps": options.steps, "waits": options.waits}
    if options.device == "cuda":
        shape = Shape("cuda", ranks=1, width=2048, depth=8, batch=1024, **how)
    else:
        shape = Shape("cpu", ranks=2, width=256, depth=4, batch=64, **how)
    seen = measure(shape, options.guard)
    cost = record_cost_us()
    step_ms = statistics.median(wall for wall, _ in seen.without) * 1e3
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": _hardware(options.device),
        "shape": asdict(shape),
        "guard": options.guard,
        "step_ms_without": step_ms,
        "step_ms_with": statistics.median(wall for wall, _ in seen.with_box) * 1e3,
        "median_ratio": statistics.median(seen.ratios(0)),
        "ratios": seen.ratios(0),
        "median_cpu_ratio": statistics.median(seen.ratios(1)),
        "cpu_ratios": seen.ratios(1),
        "interval": interval(seen.ratios(0)),
        "cpu_interval": interval(seen.ratios(1)),
        "hooks_us": seen.hooks_us,
        "records_per_step": seen.records_per_step,
        "record_us": cost,
    }
    print(
        f"step without    {step_ms:.3f} ms, with {result['step_ms_with']:.3f} ms ({shape.ranks} ranks, {shape.device})"
    )
    print(f"ratio, wall     {_spread(seen.ratios(0))}")
    print(f"ratio, CPU time {_spread(seen.ratios(1))}")
    print(f"{seen.records_per_step:.0f} records a step, {cost:.2f} us each")
    for hook, microseconds in seen.hooks_us.items():
        print(f"  {hook:32s} {microseconds:6.1f} us")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{time.strftime('%Y-%m-%d')}-blackbox-overhead-{options.device}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
