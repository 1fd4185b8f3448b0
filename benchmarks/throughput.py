"""Training speed of one GPU, ours beside transformers, interleaved in one process.

    python benchmarks/throughput.py --layers 4 --batch 2 --context 8192

Every variant trains the same shape on the same random tokens. A round is a few steps of each variant in turn, so that
clocks and neighbours disturb all alike; the table has medians over the rounds. MFU counts causal attention half and
leaves out the input embedding (docs/configuration of the peak: model_check/plan/flops.py).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from result_file import result_path, write_result
from torch.nn.attention import SDPBackend, sdpa_kernel

from model_check.config.shapes import built_in_shape
from model_check.engine.place import Place
from model_check.engine.precision import Precision
from model_check.engine.split_adamw import SplitAdamW
from model_check.engine.step import TrainStep
from model_check.models import apply_compile, build_model
from model_check.models.attention import resolve_backend
from model_check.models.fp8 import apply_fp8
from model_check.plan.flops import count_flops_per_token, peak_flops

DEVICE = torch.device("cuda")


def batch(args: argparse.Namespace, vocabulary: int) -> SimpleNamespace:
    tokens = torch.randint(0, vocabulary, (args.batch, args.context + 1), device=DEVICE)
    return SimpleNamespace(
        tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), document_ids=None, positions=None
    )


def ours(
    args: argparse.Namespace, shape: Any, *, state_dtype: torch.dtype, fp8: bool = False, attention: str = "auto"
) -> Callable[[Any], None]:
    """Model Check: bf16 parameters with an exact fp32 master, per-block compile, fused loss."""
    model = build_model(shape, DEVICE, torch.bfloat16, attention_backend=attention)
    if fp8:
        apply_fp8(model)
    apply_compile(model)
    optimizer = SplitAdamW(model.parameters(), lr=1e-5, state_dtype=state_dtype)
    step = TrainStep(model, optimizer, Precision.choose("bf16", DEVICE), Place(device=DEVICE), max_grad_norm=1.0)
    return lambda data: step([data], 1e-5)


def transformers_model(shape: Any, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        rms_norm_eps=shape.norm_eps,
        max_position_embeddings=131072,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(dtype)
    with DEVICE:
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    for layer in model.model.layers:
        layer.compile()
    return model


def peer(args: argparse.Namespace, shape: Any, *, dtype: torch.dtype) -> Callable[[Any], None]:
    """transformers at its best here: blocks and loss compiled, cuDNN attention, torch's fused AdamW, clipping."""
    model = transformers_model(shape, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    @torch.compile
    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def step(data: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        with (
            sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True),
            torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32),
        ):
            loss = loss_of(model(data.tokens).logits, data.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


VARIANTS: dict[str, Callable[..., Callable[[Any], None]]] = {
    "model-check bf16, fp32 master": lambda a, s: ours(a, s, state_dtype=torch.float32),
    "model-check bf16, fp32 master, bf16 moments": lambda a, s: ours(a, s, state_dtype=torch.bfloat16),
    "model-check fp8, fp32 master, bf16 moments": lambda a, s: ours(a, s, state_dtype=torch.bfloat16, fp8=True),
    "model-check bf16, fp32 master, cudnn": lambda a, s: ours(a, s, state_dtype=torch.float32, attention="cudnn"),
    "transformers bf16, no master": lambda a, s: peer(a, s, dtype=torch.bfloat16),
    "transformers fp32 master, bf16 autocast": lambda a, s: peer(a, s, dtype=torch.float32),
}


# What fits into one GPU together; the others by --only.
ALONE = ("model-check bf16, fp32 master, bf16 moments", "model-check bf16, fp32 master, cudnn")
TOGETHER = [name for name in VARIANTS if name not in ALONE]


def timed(step: Callable[[Any], None], data: Any, steps: int) -> float:
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(steps):
        step(data)
    torch.cuda.synchronize()
    return (time.perf_counter() - before) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", nargs="+", default=None, choices=list(VARIANTS), help="run these variants alone")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    base = built_in_shape(args.model)
    assert base is not None, f"unknown model {args.model}"
    shape = replace(base, num_layers=args.layers)
    data = batch(args, shape.vocab_size)
    tokens = args.batch * args.context
    flops, peak = count_flops_per_token(shape, args.context), peak_flops(torch.cuda.get_device_name(), "bf16")
    steps: dict[str, Callable[[Any], None]] = {}
    memory: dict[str, float] = {}
    for name in args.only or TOGETHER:
        make = VARIANTS[name]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        steps[name] = make(args, shape)
        for _ in range(3):
            steps[name](data)
        torch.cuda.synchronize()
        memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
        gc.collect()
        torch.cuda.empty_cache()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            seconds[name].append(timed(step, data, args.steps))
    rows = []
    for name, values in seconds.items():
        median = statistics.median(values)
        rows.append(
            {
                "variant": name,
                "tokens_per_s": round(tokens / median),
                "mfu": round(flops * tokens / median / peak, 4) if peak else None,
                "peak_gib": round(memory[name], 1),
                "step_ms": round(median * 1e3, 2),
                "spread": round((max(values) - min(values)) / median, 4),
            }
        )
        row = rows[-1]
        mfu = f"{row['mfu']:.1%}" if row["mfu"] is not None else "-"
        print(f"{name:46s} {row['tokens_per_s']:>8,} tokens/s  MFU {mfu}  {row['peak_gib']} GiB  {row['step_ms']} ms")
    record = {
        "attention": resolve_backend("auto", DEVICE, torch.bfloat16, shape.head_dim, False),
        "shape": {"model": args.model, "layers": args.layers, "parameters": shape.parameters()},
        "rows": rows,
    }
    write_result(args.output or result_path(f"throughput-{args.layers}layers"), record, ("torch", "transformers"))


if __name__ == "__main__":
    main()
