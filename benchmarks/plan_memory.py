"""The plan's memory beside what a GPU measures, over configurations that differ in everything the plan looks at.

    python benchmarks/plan_memory.py --out results.json

Each case trains three steps of the 8B shape with fewer layers in a process of its own, so that nothing is left from the
one before. `allocated` is the peak of PyTorch's allocator, which the plan predicts; `reserved` what it took from the
device for that; `outside` what the process holds besides (CUDA's context and kernels).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from result_file import result_path, write_result

STEPS = 3
CASE_LIMIT_S = 150


@dataclass(frozen=True)
class Case:
    """One configuration, as what it changes of the 8B shape in bf16 with compiled blocks and the fused loss."""

    name: str
    layers: int
    batch: int
    context: int
    changes: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        return [
            "model.model_path=llama-3.1-8b",
            f"model.num_layers={self.layers}",
            f"training.batch_size={self.batch}",
            f"training.context_length={self.context}",
            "parallel.strategy=ddp",
            *self.changes,
        ]


RECOMPUTE = "parallel.activation_checkpointing"
CASES = (
    Case("bf16", 4, 2, 8192),
    Case("bf16, short context", 4, 4, 2048),
    Case("bf16, selective recomputation", 8, 2, 8192, (f"{RECOMPUTE}=selective",)),
    Case("bf16, full recomputation", 8, 2, 8192, (f"{RECOMPUTE}=full",)),
    Case("fp8", 4, 2, 8192, ("training.precision=fp8",)),
    Case("fp32", 2, 1, 2048, ("training.precision=fp32",)),
    Case("bf16, plain loss", 4, 1, 8192, ("training.fused_loss=off",)),
    Case("bf16 moments, 2 micro-batches", 4, 1, 2048, ("training.optimizer_states=bf16", "training.grad_accum_nums=2")),
    Case("fp16", 4, 1, 8192, ("training.precision=fp16",)),
    Case("bf16, not compiled", 4, 1, 8192, ("training.compile=off",)),
    Case("fsdp, one rank, resharding", 4, 1, 8192, ("parallel.strategy=fsdp", "fsdp.reshard=on")),
    Case("bf16 moments, 16 layers", 16, 1, 4096, ("training.optimizer_states=bf16",)),
    Case("fp8, selective recomputation", 8, 2, 8192, ("training.precision=fp8", f"{RECOMPUTE}=selective")),
    Case("fsdp, one rank, kept gathered", 4, 1, 8192, ("parallel.strategy=fsdp", "fsdp.reshard=off")),
)


def measure(case: Case) -> dict[str, Any]:
    """Runs in a process of its own: three steps, then the allocator's own numbers."""
    import torch

    from model_check.config import load_config
    from model_check.engine.arrangement import arrange_llama
    from model_check.engine.optimizer import build_optimizer
    from model_check.engine.place import Place
    from model_check.engine.step import TrainStep
    from model_check.plan.choice import estimate
    from model_check.plan.devices import device_named
    from model_check.plan.speed import plan_speed
    from model_check.plan.workload import workload_of

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    config = load_config(overrides=case.overrides)
    place = Place(device=device, label="GPU0")
    arranged = arrange_llama(config, place, 1)
    shape = arranged.bare_model.shape
    planned = estimate(config, arranged.layout, shape.parameters(), shape)
    step = TrainStep(
        arranged.model,
        build_optimizer(arranged.bare_model, config.training),
        arranged.precision,
        place,
        max_grad_norm=config.training.max_grad_norm,
        passes=arranged.passes,
        norm_of=arranged.norm_of,
    )
    tokens = torch.randint(0, shape.vocab_size, (case.batch, case.context + 1), device=device)
    batch = SimpleNamespace(
        tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), document_ids=None, positions=None
    )
    seconds = 0.0
    for _ in range(STEPS):
        torch.cuda.synchronize()
        before = time.perf_counter()
        step([batch] * config.accumulation(1), 1e-5)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - before
    reserved = torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    speed = plan_speed(shape, workload_of(config, 1), arranged.layout, device_named(name))
    return {
        "gpu": name,
        "torch": torch.__version__,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "planned_gib": planned.allocated / 2**30,
        "planned_moment": planned.peak.name,
        "planned_parts_gib": {part: size / 2**30 for part, size in planned.peak.parts.items()},
        "reserved_gib": reserved / 2**30,
        "planned_reserved_gib": planned.reserved / 2**30,
        "outside_gib": (total - free - torch.cuda.memory_reserved()) / 2**30,
        "device_gib": total / 2**30,
        "step_s": seconds,
        "planned_step_s": speed.step_s if speed is not None else None,
    }


def run_case(number: int) -> dict[str, Any]:
    case = CASES[number]
    row: dict[str, Any] = {"case": case.name, "layers": case.layers, "batch": case.batch, "context": case.context}
    started = time.perf_counter()
    command = [sys.executable, __file__, "--case", str(number)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CASE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {**row, "failed": f"no result after {CASE_LIMIT_S} s"}
    row["took_s"] = round(time.perf_counter() - started, 1)
    if done.returncode:
        return {**row, "failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {**row, **found, "error": found["planned_gib"] / found["peak_gib"] - 1}


def show(row: dict[str, Any]) -> None:
    head = f"{row['case']:32} {row['layers']:>3} {row['batch']:>3} {row['context']:>6}"
    if "failed" in row:
        print(f"{head}  failed: {row['failed']}", flush=True)
        return
    planned_step = f"{row['planned_step_s']:.3f}" if row["planned_step_s"] else "-"
    print(
        f"{head} {row['peak_gib']:>9.2f} {row['planned_gib']:>8.2f} {row['error']:>+7.1%} {row['reserved_gib']:>9.2f} "
        f"{row['planned_reserved_gib']:>8.2f} {row['outside_gib']:>8.2f} {row['step_s']:>7.3f} {planned_step:>8}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    parser.add_argument("--budget-s", type=float, default=330, help="no case begins after this many seconds")
    parser.add_argument("--case", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(measure(CASES[args.case])))
        return
    output = args.out or result_path("plan-memory")
    print(
        f"{'case':32} {'lay':>3} {'bat':>3} {'contxt':>6} {'peak GiB':>9} {'planned':>8} {'error':>7} {'reserved':>9} "
        f"{'planned':>8} {'outside':>8} {'step s':>7} {'planned':>8}"
    )
    started, rows = time.perf_counter(), []
    for number in range(len(CASES)):
        if time.perf_counter() - started > args.budget_s:
            rows.append({"case": CASES[number].name, "skipped": f"after {args.budget_s:.0f} s"})
            continue
        rows.append(run_case(number))
        show(rows[-1])
        # After each case: a run that is cut short keeps what it has.
        write_result(output, {"rows": rows})
    errors = [abs(row["error"]) for row in rows if "error" in row]
    if errors:
        print(f"{len(errors)} cases, largest error {max(errors):.1%}, mean {sum(errors) / len(errors):.1%}")


if __name__ == "__main__":
    main()
