"""What it costs to know the line behind every live block of GPU memory: steps with and without, in turn.

    python benchmarks/memory_watch.py --out results.json

The production shape (4 layers of the 8B model, batch 2, 8192 tokens), compiled. Rounds alternate, so that clocks and
neighbours disturb both alike; the numbers are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from result_file import write_result

from model_check.config import load_config
from model_check.engine.arrangement import arrange_llama
from model_check.engine.optimizer import build_optimizer
from model_check.engine.place import Place
from model_check.engine.step import TrainStep


def watch(on: bool) -> None:
    torch.cuda.memory._record_memory_history(
        "state" if on else None, context="state" if on else None, stacks="python", max_entries=1
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", choices=("on", "off"), default="on")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    config = load_config(
        overrides=[
            "model.model_path=llama-3.1-8b",
            "model.num_layers=4",
            f"training.batch_size={args.batch}",
            f"training.context_length={args.context}",
            f"training.compile={args.compile}",
        ]
    )
    place = Place(device=torch.device("cuda", 0), label="GPU0")
    arranged = arrange_llama(config, place, 1)
    step = TrainStep(
        arranged.model,
        build_optimizer(arranged.bare_model, config.training),
        arranged.precision,
        place,
        max_grad_norm=1.0,
        passes=arranged.passes,
        norm_of=arranged.norm_of,
    )
    tokens = torch.randint(0, arranged.bare_model.shape.vocab_size, (args.batch, args.context + 1), device="cuda")
    batch = SimpleNamespace(
        tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), document_ids=None, positions=None
    )
    for _ in range(4):
        step([batch], 1e-5)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.rounds):
        for on in (False, True):
            watch(on)
            step([batch], 1e-5)
            torch.cuda.synchronize()
            before = time.perf_counter()
            for _ in range(args.steps):
                step([batch], 1e-5)
            torch.cuda.synchronize()
            seconds[on].append((time.perf_counter() - before) / args.steps)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    step([batch], 1e-5)
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - allocations
    off, on_ = statistics.median(seconds[False]), statistics.median(seconds[True])
    record = {
        "step_ms_without": off * 1e3,
        "step_ms_with": on_ * 1e3,
        "cost": on_ / off - 1,
        "allocations_per_step": allocations,
        "rounds_without_ms": [value * 1e3 for value in seconds[False]],
        "rounds_with_ms": [value * 1e3 for value in seconds[True]],
    }
    print(
        f"{off * 1e3:.2f} ms without, {on_ * 1e3:.2f} ms with: {on_ / off - 1:+.2%}, {allocations} allocations a step"
    )
    if args.out is not None:
        write_result(args.out, record)


if __name__ == "__main__":
    main()
