"""Memory on a real GPU: the plan against the allocator, and what a run that runs out of memory says."""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from model_check.config import load_config
from model_check.engine.arrangement import arrange_llama
from model_check.engine.optimizer import build_optimizer
from model_check.engine.place import Place
from model_check.engine.step import TrainStep
from model_check.plan.choice import estimate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GIB = 2**30

SHORTAGE = """
import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(4 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
model = nn.Linear(4096, 4096, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    kept.append(torch.zeros(2**28, dtype=torch.uint8, device="cuda"))  # FAULT
"""

PIECES = """
import torch

torch.cuda.set_per_process_memory_fraction(7 * 2**30 / torch.cuda.get_device_properties(0).total_memory)
half = 2**29


def block(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")  # FAULT


first, second = [], []
for _ in range(6):
    whole = block(2 * half)
    del whole
    first.append(block(half))
    second.append(block(half))
del first[:]
block(3 * half)
"""


def run_foreign(folder: Path, text: str) -> tuple[dict[str, Any], int, Path]:
    """The first finding, the line marked FAULT, and the run directory."""
    script, run_dir = folder / "script.py", folder / "run"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "model_check.cli.main", "run", "--nproc", "1", "--run-dir", run_dir, "script.py"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
    )
    verdict = json.loads((run_dir / "verdict.json").read_text())
    assert verdict["findings"], done.stdout[-3000:] + done.stderr[-3000:]
    line = next(number for number, row in enumerate(text.splitlines(), 1) if "FAULT" in row)
    return verdict["findings"][0], line, run_dir


def test_a_shortage_names_the_line_the_holders_and_leaves_a_snapshot(tmp_path: Path) -> None:
    finding, line, run_dir = run_foreign(tmp_path, SHORTAGE)
    assert (finding["code"], finding["ranks"]) == ("MC501", [0])
    assert finding["location"] == f"script.py:{line}"
    said = "\n".join(finding["evidence"])
    assert "it asked for 256 MiB" in said
    assert f"256 MiB of activations and temporaries made at script.py:{line}" in said
    record = json.loads((run_dir / "dumps" / "oom-rank-0.json").read_text())
    # 16.8 M parameters: 64 MiB of weights, as much of gradients, twice as much of moments.
    assert record["categories"]["parameters"] == pytest.approx(64 * 2**20, rel=0.05)
    assert record["categories"]["gradients"] == pytest.approx(64 * 2**20, rel=0.05)
    assert record["categories"]["optimizer"] == pytest.approx(128 * 2**20, rel=0.05)
    with (run_dir / "dumps" / "oom-rank-0.pickle").open("rb") as file:
        snapshot = pickle.load(file)  # written by this test's own process tree
    assert snapshot["segments"] and "device_traces" in snapshot


def test_memory_in_pieces_is_told_from_a_shortage(tmp_path: Path) -> None:
    finding, line, _ = run_foreign(tmp_path, PIECES)
    assert (finding["code"], finding["location"]) == ("MC502", f"script.py:{line}")
    assert any(
        "3.00 GiB are free inside the allocator in pieces, the largest 512 MiB" in e for e in finding["evidence"]
    )


def test_our_own_trainer_says_what_the_plan_expected(tmp_path: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    # Logits of all tokens at once fill any GPU: 12 bytes for each of 128256 words.
    batch = int(1.3 * total * GIB / (12 * 128256 * 2048))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "model_check.cli.main", "train", "--preset", "production", "--max-steps", "2"),
            *("--set", "training.fused_loss=off", "--set", "model.num_layers=1"),
            *("--set", "training.context_length=2048", "--set", f"training.batch_size={batch}"),
            *("--set", "parallel.strategy=ddp", "--gpus", "0", "--run-dir", str(tmp_path / "run"), "--force"),
        ],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=tmp_path,
    )
    assert "tried all the same (--force)" in done.stderr
    assert "[GPU0] MEM:POST-MODEL RSS" in done.stdout and "allocated" in done.stdout
    finding = json.loads((tmp_path / "run" / "verdict.json").read_text())["findings"][0]
    assert (finding["code"], finding["ranks"]) == ("MC501", [0]), done.stdout[-3000:]
    assert any(line.startswith("inferred: the plan expected") for line in finding["evidence"])
    assert finding["fix"][0].startswith("add --set training.fused_loss=auto")


def test_a_run_that_cannot_fit_stops_before_the_launch(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "model_check.cli.main", "train", "--preset", "32b"),
            *("--set", "parallel.strategy=ddp", "--gpus", "0", "--run-dir", str(tmp_path / "run")),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "[MC503] this run cannot fit: a rank needs" in done.stderr and "--force" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("keys", [(), ("parallel.activation_checkpointing=full",), ("training.fused_loss=off",)])
def test_the_plan_is_within_a_tenth_of_the_measured_peak(keys: tuple[str, ...]) -> None:
    torch._dynamo.reset()
    gc.collect()  # the models of earlier tests are garbage by now, which must not be collected between the two readings
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    config = load_config(
        overrides=[
            "model.model_path=llama-3.1-8b",
            "model.num_layers=2",
            "training.batch_size=1",
            "training.context_length=4096",
            *keys,
        ]
    )
    place = Place(device=torch.device("cuda", 0), label="GPU0")
    arranged = arrange_llama(config, place, 1)
    shape = arranged.bare_model.shape
    step = TrainStep(
        arranged.model,
        build_optimizer(arranged.bare_model, config.training),
        arranged.precision,
        place,
        max_grad_norm=1.0,
        passes=arranged.passes,
        norm_of=arranged.norm_of,
    )
    tokens = torch.randint(0, shape.vocab_size, (1, 4097), device="cuda")
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    step([batch], 1e-5)
    torch.cuda.reset_peak_memory_stats()
    step([batch], 1e-5)
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    planned = estimate(config, arranged.layout, shape.parameters(), shape).allocated
    assert planned == pytest.approx(measured, rel=0.1)
