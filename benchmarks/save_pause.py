"""How long training waits for a background checkpoint, and how fast it runs while the checkpoint is being written.

    python benchmarks/save_pause.py --layers 24 --out pause.json

The 8B shape with N of its layers; bf16 parameters with an exact fp32 master and bf16 moments: 8 bytes a parameter.
A pause is measured from outside: the wall time of a save and of the step after it, less that of a quiet step.
Each checkpoint is removed before the next one is written, so the disk needs room for one.
`--route pinned` or `pageable` leaves out the faster ways of copying, to measure what is left where memory is short.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from result_file import write_result

from model_check.checkpoint.peers import Peers
from model_check.checkpoint.saver import Retention, Saver
from model_check.checkpoint.staging import Limits
from model_check.checkpoint.verify import verify
from model_check.config import load_config
from model_check.engine.arrangement import arrange_llama
from model_check.engine.optimizer import build_optimizer
from model_check.engine.place import Place
from model_check.engine.resume import model_tensors, optimizer_tensors
from model_check.engine.step import TrainStep

GIB = 2**30
WARM_UP = 4
QUIET_STEPS = 8
NO_DEVICE = 1 << 62
ROUTES = {
    "auto": Limits(),
    "pinned": Limits(device_margin=NO_DEVICE),
    "pageable": Limits(device_margin=NO_DEVICE, pinned_share=0.0),
}


def build(args: argparse.Namespace, device: torch.device) -> tuple[TrainStep, Any]:
    config = load_config(
        overrides=[
            f"model.model_path={args.model}",
            f"training.batch_size={args.batch}",
            f"training.context_length={args.context}",
            f"training.optimizer_states={args.states}",
            "training.precision=bf16",
            "parallel.strategy=ddp",
            *([f"model.num_layers={args.layers}"] if args.layers else []),
            *args.set,
        ]
    )
    place = Place(device=device, label="GPU0" if device.type == "cuda" else "CPU0")
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
    vocabulary = arranged.bare_model.shape.vocab_size
    tokens = torch.randint(0, vocabulary, (args.batch, args.context + 1), device=device)
    batch = SimpleNamespace(tokens=tokens[:, :-1], targets=tokens[:, 1:], document_ids=None, positions=None)
    return step, batch


def bus_gib_per_s(device: torch.device) -> dict[str, float]:
    """What the machine's bus gives from device to host: the floor under every pause that is not hidden."""
    values = torch.ones(GIB, dtype=torch.uint8, device=device)
    speeds = {}
    for name, pinned in (("pinned", True), ("pageable", False)):
        host = torch.empty(GIB, dtype=torch.uint8, pin_memory=pinned)
        for _ in range(2):  # the first touches the pages
            torch.cuda.synchronize()
            began = time.perf_counter()
            host.copy_(values, non_blocking=True)
            torch.cuda.synchronize()
            speeds[name] = round(1 / (time.perf_counter() - began), 2)
    return speeds


def timed(work: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def prepare(
    saver: Saver, step: TrainStep, train: Callable[[], Any], synchronize: Callable[[], None], tokens: int
) -> dict[str, Any]:
    """Training goes on while memory for the copies is made, as it does long before the first save of a run."""
    began = time.perf_counter()
    saver.prepare({**model_tensors(step.model), **optimizer_tensors(step.model, step.optimizer)})
    called_s = time.perf_counter() - began
    during: list[float] = []
    while saver.is_preparing:
        during.append(timed(train, synchronize))
    return {
        "host_waited_s": round(called_s, 3),
        "prepared_after_s": round(time.perf_counter() - began, 2),
        "tokens_per_s_meanwhile": round(tokens / statistics.median(during)) if during else None,
    }


def one_save(
    number: int,
    saver: Saver,
    step: TrainStep,
    train: Callable[[], Any],
    synchronize: Callable[[], None],
    quiet_s: float,
    tokens: int,
) -> dict[str, Any]:
    """Saves, trains on at once, and goes on training until the checkpoint is committed."""
    state = {**model_tensors(step.model), **optimizer_tensors(step.model, step.optimizer)}
    host: list[float] = []
    with_step = timed(lambda: (host.append(saver.save(number, state, {})), train()), synchronize)
    device_wait = saver.device_wait_s() or 0.0
    during: list[float] = []
    while saver.is_saving:
        during.append(timed(train, synchronize))
    saver.wait()
    (saved,) = saver.poll()
    if saved.error is not None:
        raise SystemExit(str(saved.error))
    gib = saved.bytes / GIB
    row = {
        "pause_s": round(with_step - quiet_s, 3),
        "host_waited_s": round(host[0], 3),
        "device_waited_s": round(device_wait, 3),
        "gib": round(gib, 2),
        "committed_after_s": round(saved.seconds, 2),
        "write_gib_per_s": round(gib / saved.seconds, 2),
        "steps_during_write": len(during),
        "tokens_per_s_during_write": round(tokens / statistics.median(during)) if during else None,
        "note": saved.note,
    }
    if number == 0:
        began = time.perf_counter()
        verify(saved.path)
        row["verify_s"] = round(time.perf_counter() - began, 2)
    shutil.rmtree(saved.path)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--states", choices=("fp32", "bf16"), default="bf16", help="format of the moments")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="more settings; repeatable")
    parser.add_argument("--route", choices=tuple(ROUTES), default="auto")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=200.0, help="no further save is begun after this long")
    parser.add_argument("--folder", type=Path, default=Path("save-pause"))
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    started = time.perf_counter()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    on_gpu = device.type == "cuda"

    def synchronize() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    bus = bus_gib_per_s(device) if on_gpu else {}
    print(f"bus, GiB/s: {bus}", flush=True)
    step, batch = build(args, device)

    def train() -> None:
        step([batch], 1e-5)

    for _ in range(WARM_UP):
        train()
    shutil.rmtree(args.folder, ignore_errors=True)
    saver = Saver(args.folder, Peers(), name="run", retention=Retention(last=1), limits=ROUTES[args.route])
    step.before_update = saver.hold_update
    tokens = args.batch * args.context
    quiet_s = statistics.median(timed(train, synchronize) for _ in range(QUIET_STEPS))
    print(f"quiet step {quiet_s:.3f} s, {tokens / quiet_s:,.0f} tokens/s", flush=True)
    preparing = prepare(saver, step, train, synchronize, tokens)
    print(json.dumps(preparing), flush=True)
    rows = []
    for number in range(args.saves):
        if time.perf_counter() - started > args.seconds:
            print(f"{args.seconds:.0f} s are over: {number} saves", flush=True)
            break
        rows.append(one_save(number, saver, step, train, synchronize, quiet_s, tokens))
        print(json.dumps(rows[-1]), flush=True)
    record = {
        "device": device.type,
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "route": args.route,
        "bus_gib_per_s": bus,
        "quiet_step_s": round(quiet_s, 4),
        "tokens_per_s_quiet": round(tokens / quiet_s),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 1) if on_gpu else None,
        "preparing": preparing,
        "saves": rows,
    }
    print(json.dumps(record, indent=1))
    if args.out:
        write_result(args.out, record)
    shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
