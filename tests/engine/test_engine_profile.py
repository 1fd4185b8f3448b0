"""A profile of a run that ends before its window does: only whole steps are spoken of, and nothing is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model_check.engine.profile import SKIPPED_STEPS, TRACED_STEPS, profiled


def profile_of(steps: int, folder: Path) -> list[str]:
    """What is said about so many steps, each of them a product that fills it."""
    said: list[str] = []
    left = torch.ones(256, 256)
    with profiled(folder, 0, said.append) as step_done:
        for _ in range(steps):
            for _ in range(20):
                left @ left
            step_done()
    return said


@pytest.mark.parametrize("steps", range(SKIPPED_STEPS + 1))
def test_a_run_that_ends_before_the_window_says_so(steps: int, tmp_path: Path) -> None:
    [line] = profile_of(steps, tmp_path)
    assert line.startswith(f"profile: nothing was traced in {steps} step") and line.endswith("train 5 steps or more")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [SKIPPED_STEPS + 1, SKIPPED_STEPS + TRACED_STEPS, SKIPPED_STEPS + TRACED_STEPS + 2])
def test_only_whole_steps_are_summed_up(steps: int, tmp_path: Path) -> None:
    words, place = profile_of(steps, tmp_path)
    summary = json.loads((tmp_path / "rank0.summary.json").read_text())
    assert summary["steps"] == min(steps - SKIPPED_STEPS, TRACED_STEPS)
    assert summary["shares"]["GEMM"] > 0
    assert words == f"profile: {summary['words']}" and ".pt.trace.json" in place
