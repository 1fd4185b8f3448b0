"""`--profile` on two ranks: traces that other tools open, a sentence, and communication that agrees with the model."""

from __future__ import annotations

import json
import re

import pytest

from model_check.config import load_config, resolve_shape
from model_check.data import load_tokenizer
from tests.conftest import Shell

STEPS = 6
LOSS_AND_STOP_BYTES = 8  # the two numbers that the ranks share in each step


@pytest.mark.slow
def test_a_profiled_run_explains_itself(shell: Shell) -> None:
    done = shell.train("--profile", "--max-steps", str(STEPS), "--nproc", "2", "--set", "training.profile_ranks=[1]")
    assert done.code == 0, done.err
    said = re.findall(r"^\[CPU(\d)\] profile: .*\d+ % GEMM.*; the first thing to change is ", done.out, re.M)
    assert said == ["1"], "only the chosen rank is traced"
    folder = done.run_dir / "profile"
    (trace,) = folder.glob("rank1.*.pt.trace.json")
    steps = {e["name"] for e in json.loads(trace.read_text())["traceEvents"] if "ProfilerStep" in str(e.get("name"))}
    assert len(steps) == 3
    shares = json.loads((folder / "rank1.summary.json").read_text())["shares"]
    assert sum(shares.values()) == pytest.approx(1) and shares["GEMM"] > 0 and "attention" in shares
    config = load_config(preset="debug")
    parameters = resolve_shape(config.model, load_tokenizer(config.data.tokenizer).vocab_size).parameters()
    communication = json.loads((folder / "rank1.communication.json").read_text())
    assert communication["steps"] == STEPS
    reduced = communication["collectives"]["all_reduce"]
    assert reduced["bytes"] == STEPS * (4 * parameters + LOSS_AND_STOP_BYTES)
