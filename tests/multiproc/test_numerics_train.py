"""`model-check train` on weights that overflow: the terminal, the files and the verdict, in several layouts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model_check.config import load_config, resolve_shape
from model_check.models import build_model
from tests.conftest import ROOT, Outcome, Shell

PAGE = ROOT / "docs" / "numerics.md"


def weights_with_bad_block(tmp_path: Path, block: int) -> Path:
    """A file of weights of which one block makes infinity: each factor is in range, their product is not."""
    model = build_model(resolve_shape(load_config(preset="debug").model, 4096), seed=1)
    state = model.state_dict()
    for name in ("w1", "w3"):
        state[f"layers.{block}.feed_forward.{name}.weight"] *= 1e24
    torch.save(state, tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def train(shell: Shell, weights: Path, layout: str) -> Outcome:
    return shell.train("--nproc", "2", "--resume", str(weights), "--set", layout, "--max-steps", "3")


@pytest.mark.slow
def test_the_terminal_the_dump_and_the_verdict(shell: Shell, tmp_path: Path) -> None:
    done = train(shell, weights_with_bad_block(tmp_path, 1), "parallel.strategy=ddp")
    assert done.code == 1
    lines = [line.removeprefix("[CPU0] ") for line in done.out.splitlines() if line.startswith("[CPU0] ")]
    start = lines.index("NaN GRADIENT DETECTED [CPU 0]") - 1
    assert lines[start : start + 10] == [
        "=" * 80,
        "NaN GRADIENT DETECTED [CPU 0]",
        "=" * 80,
        "Step: 0",
        "Loss: nan",
        "Gradient Norm: nan",
        "",
        "=" * 40,
        "PROBLEMATIC TENSORS:",
        "=" * 40,
    ]
    assert "Checkpoint saved: .checkpoints/nan_grad_step_0.pt" in lines
    assert "Debug tensors saved: .checkpoints/debug/nan_debug_step_0.pkl" in lines
    assert done.out.count("NaN GRADIENT DETECTED") == 1, "the lowest guilty rank prints, the others do not"
    assert "Traceback" not in done.out + done.err

    found = done.verdict()["findings"][0]
    assert (found["code"], found["ranks"], found["step"], found["severity"]) == ("MC407", [0, 1], 0, "error")
    assert "model_check/models/llama.py:" in found["location"]
    assert "layers.1.feed_forward" in found["title"]
    dumps = sorted(path.name for path in (done.run_dir / "dumps").iterdir())
    assert "nan_debug_step_0.safetensors" in dumps and "nan_debug_step_0_rank_1.pkl" in dumps

    script = re.search(r"```python\n(import pickle.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert script is not None
    shown = subprocess.run(
        [sys.executable, "-c", script[1]], cwd=shell.folder, capture_output=True, text=True, timeout=60
    )
    assert "layers.1.feed_forward.w2.weight: 100.0% NaN" in shown.stdout.splitlines(), shown.stderr

    for pickled in (shell.folder / ".checkpoints" / "debug").glob("*.pkl"):
        pickled.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")  # would run a command if anybody opened it
    again = shell.model_check("diagnose", str(done.run_dir), "--json")
    assert json.loads(again.out)["findings"][0]["code"] == "MC407"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "block", "ranks", "victims"),
    [
        ("parallel.pipeline=2", 0, [0], [1]),  # the second stage is handed what the first one made
        ("parallel.pipeline=2", 1, [1], [0]),
        ("parallel.tensor=2", 1, [0, 1], []),
    ],
)
def test_a_model_that_is_cut_up_names_the_rank_that_has_the_layer(
    shell: Shell, tmp_path: Path, layout: str, block: int, ranks: list[int], victims: list[int]
) -> None:
    done = train(shell, weights_with_bad_block(tmp_path, block), layout)
    (found,) = done.verdict()["findings"]
    assert (found["code"], found["ranks"], found["victims"]) == ("MC407", ranks, victims), done.out
    assert f"layers.{block}.feed_forward" in found["title"]


@pytest.mark.slow
def test_a_step_that_overflows_in_fp16_says_that_it_was_skipped_and_at_which_scale_it_goes_on(shell: Shell) -> None:
    model = build_model(resolve_shape(load_config(preset="debug").model, 4096), seed=1)
    weights = model.state_dict()
    # The model stays the same, but these gradients are a thousand times larger: too large for the first loss scales.
    weights["layers.0.ffn_norm.weight"] *= 1024
    for name in ("w1", "w3"):
        weights[f"layers.0.feed_forward.{name}.weight"] /= 1024
    torch.save(weights, shell.folder / "weights.pt")
    done = shell.train(
        *("--nproc", "2", "--max-steps", "6", "--resume", "weights.pt"),
        *("--set", "training.precision=fp16", "--set", "training.use_amp=true", "--set", "training.log_interval=1"),
    )
    assert done.code == 0, done.err
    skipped = [record["skipped"] for record in done.metrics()]
    count = skipped.index(False)
    assert 0 < count < 6 and not any(skipped[count:])
    for label in ("CPU0", "CPU1"):
        lines = [line for line in done.out.splitlines() if line.startswith(f"[{label}] Step [")]
        said = [line.partition(" | Skipped: ")[2] for line in lines]
        assert said[:count] == [f"overflow, loss scale down to {2 ** (15 - step)}" for step in range(count)]
        assert said[count:] == [""] * (6 - count)
