"""Memory and speed of none, selective and full activation checkpointing on one GPU, beside what the plan expected.

    python benchmarks/activation_checkpointing.py --layers 32 --batch 1 --context 8192

The 8B shape with N of its layers; bf16 parameters with an exact fp32 master and bf16 moments, per-block compile, random
tokens. Each mode runs alone on an empty device. `--strategy fsdp` measures the same through fully_shard on one rank.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from result_file import result_path, write_result

from model_check.config import Config, load_config
from model_check.engine.arrangement import arrange_llama
from model_check.engine.optimizer import build_optimizer
from model_check.engine.place import Place
from model_check.engine.step import TrainStep
from model_check.plan.choice import estimate
from model_check.plan.flops import count_flops_per_token, peak_flops
from model_check.plan.memory import GIB

MODES = ("none", "selective", "full")
WARM_UP = 3


def settings(args: argparse.Namespace, mode: str) -> Config:
    return load_config(
        overrides=[
            f"model.model_path={args.model}",
            f"model.num_layers={args.layers}",
            f"training.batch_size={args.batch}",
            f"training.context_length={args.context}",
            f"training.optimizer_states={args.states}",
            f"parallel.strategy={args.strategy}",
            f"parallel.activation_checkpointing={mode}",
        ]
    )


def measure(args: argparse.Namespace, mode: str) -> dict[str, object]:
    """One mode on an empty device; running out of memory is a result, too."""
    device = torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    config = settings(args, mode)
    try:
        arranged = arrange_llama(config, Place(device=device, label="GPU0"), 1)
        shape = arranged.bare_model.shape
        step = TrainStep(
            arranged.model,
            build_optimizer(arranged.bare_model, config.training),
            arranged.precision,
            Place(device=device, label="GPU0"),
            max_grad_norm=1.0,
            passes=arranged.passes,
            norm_of=arranged.norm_of,
        )
        tokens = torch.randint(0, shape.vocab_size, (args.batch, args.context + 1), device=device)
        batch = SimpleNamespace(tokens=tokens[:, :-1], targets=tokens[:, 1:], document_ids=None, positions=None)
        seconds = []
        for _ in range(WARM_UP + args.steps):
            torch.cuda.synchronize()
            before = time.perf_counter()
            step([batch], 1e-5)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - before)
    except torch.cuda.OutOfMemoryError:
        return {"mode": mode, "out_of_memory": True}
    median = statistics.median(seconds[WARM_UP:])
    rate = args.batch * args.context / median
    peak = peak_flops(torch.cuda.get_device_name(), "bf16")
    planned = estimate(config, arranged.layout, shape.parameters(), shape).allocated
    return {
        "mode": mode,
        "tokens_per_s": round(rate),
        "mfu": round(rate * count_flops_per_token(shape, args.context) / peak, 4) if peak else None,
        "step_ms": round(median * 1e3, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 1),
        "planned_gib": round(planned / GIB, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--states", choices=("fp32", "bf16", "8bit"), default="bf16", help="optimizer states")
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--mode", action="append", choices=MODES, help="only this one; repeatable")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark measures a GPU, and there is none here")
    rows = []
    print(f"{'mode':10} {'tokens/s':>9} {'MFU':>7} {'ms/step':>9} {'peak GiB':>9} {'planned':>8}")
    for mode in args.mode or MODES:
        row = measure(args, mode)
        rows.append(row)
        if "out_of_memory" in row:
            print(f"{mode:10} out of memory", flush=True)
            continue
        mfu = f"{row['mfu']:.1%}" if row["mfu"] is not None else "-"
        print(
            f"{mode:10} {row['tokens_per_s']:>9,} {mfu:>7} {row['step_ms']:>9} {row['peak_gib']:>9} "
            f"{row['planned_gib']:>8}",
            flush=True,
        )
    write_result(args.output or result_path(f"activation-checkpointing-{args.layers}layers"), {"rows": rows})


if __name__ == "__main__":
    main()
