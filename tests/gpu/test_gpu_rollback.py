"""`debug.on_nan: rollback` on a GPU, where the host is steps ahead of the device when a bad step becomes known."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import Shell
from tests.rare_tokens import SETTINGS, poisoned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_run_goes_back_and_trains_on_what_came_after(shell: Shell) -> None:
    weights = poisoned(shell, 5, 6)
    settings = (*SETTINGS, "debug.on_nan=rollback", "checkpoint.dir=saved")
    words = [word for value in settings for word in ("--set", value)]
    back = shell.train("--nproc", "1", "--resume", str(weights), "--max-steps", "8", *words)
    assert back.code == 0, back.out + back.err
    steps = [record["step"] for record in back.metrics()]
    assert steps == [0, 1, 2, 3, 4, 5, 4, 5, 4, 5, 6, 7], "twice back to the checkpoint after step 3"
    again = [record["loss"] for record in back.metrics() if record["step"] == 4]
    assert again == [again[0]] * 3, "the same weights, data and random numbers"
    (found,) = back.verdict()["findings"]
    assert (found["severity"], found["ranks"], found["step"]) == ("warning", [0], 5)
    assert "observed: the run went back to a checkpoint 2 times, from step 5, 5" in found["evidence"]
    assert back.verdict()["steps_completed"] == 8
