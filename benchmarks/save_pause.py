"""How long training waits for a checkpoint: pause of a background save, of the one after it, and of a waiting one.

    python benchmarks/save_pause.py --shape Llama-3.1-8B --layers 16 --folder /tmp/pause

The state of 32 layers with fp32 moments is 96 GB: mind the disk, and the host memory that the copy needs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch

from model_check.checkpoint.peers import Peers
from model_check.checkpoint.saver import Retention, Saver
from model_check.checkpoint.verify import verify
from model_check.config.resolve import base_shape
from model_check.engine.resume import materialize_optimizer, model_tensors, optimizer_tensors
from model_check.engine.split_adamw import SplitAdamW
from model_check.models import build_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="Llama-3.1-8B")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--states", choices=("fp32", "bf16"), default="bf16", help="format of the moments")
    parser.add_argument("--folder", type=Path, default=Path("save-pause"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = base_shape(arguments.shape)
    if shape is None:
        raise SystemExit(f"{arguments.shape} is no built-in shape")
    if arguments.layers:
        shape = replace(shape, num_layers=arguments.layers)
    model = build_model(shape, device, torch.bfloat16, seed=0)
    dtype = torch.float32 if arguments.states == "fp32" else torch.bfloat16
    optimizer = SplitAdamW(model.parameters(), state_dtype=dtype)
    materialize_optimizer(optimizer)
    state = {**model_tensors(model), **optimizer_tensors(model, optimizer)}
    total = sum(tensor.nbytes for tensor in state.values())
    shutil.rmtree(arguments.folder, ignore_errors=True)
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "parameters": shape.parameters(),
        "bytes": total,
    }
    saver = Saver(arguments.folder, Peers(), name="run", retention=Retention(last=1))
    for step, (what, wait) in enumerate((("first", False), ("second", False), ("waiting", True))):
        if device.type == "cuda":
            torch.cuda.synchronize()
        pause = saver.save(step, state, {}, wait=wait)
        saver.wait()
        (saved,) = saver.poll()
        if saved.error is not None:
            raise SystemExit(str(saved.error))
        result[f"{what}_pause_s"], result[f"{what}_total_s"] = round(pause, 3), round(saved.seconds, 3)
        print(f"{what}: training waits {pause:.3f} s, committed after {saved.seconds:.2f} s", flush=True)
    began = time.perf_counter()
    verify(saved.path)
    result["verify_s"] = round(time.perf_counter() - began, 3)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    shutil.rmtree(arguments.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
