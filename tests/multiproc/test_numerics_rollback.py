"""`debug.on_nan: rollback` on two ranks: all of them go back together, and the data of the bad step stays out.

One rank's share of a global batch holds a token whose embedding is not a number. Going back and leaving that batch out
must give the losses of a run that met the batch, skipped it and went on: both train on the same data in the same order.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.conftest import Outcome, Shell
from tests.rare_tokens import SETTINGS, poisoned

pytestmark = pytest.mark.slow

RANKS = 2
GUILTY = 1


def train(shell: Shell, weights: Path, strategy: str, on_nan: str, steps: int) -> Outcome:
    settings = (*SETTINGS, f"parallel.strategy={strategy}", f"debug.on_nan={on_nan}", f"checkpoint.dir={on_nan}")
    words = [word for value in settings for word in ("--set", value)]
    return shell.train("--nproc", str(RANKS), "--resume", str(weights), "--max-steps", str(steps), *words)


def steps_of(done: Outcome) -> list[int]:
    return [record["step"] for record in done.metrics()]


def good_losses(done: Outcome) -> list[float]:
    """Of every step that was applied, in order; what was gone back on is not among them."""
    last = {record["step"]: float(record["loss"]) for record in done.metrics()}
    return [loss for _, loss in sorted(last.items()) if math.isfinite(loss)]


def bad_steps(done: Outcome, rank: int) -> list[tuple[int, str]]:
    lines = (done.run_dir / "events" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
    return [(record["step"], record["action"]) for record in map(json.loads, lines) if record["event"] == "nonfinite"]


def steps_taken(done: Outcome, rank: int) -> list[int]:
    """The steps that this rank shows in its log."""
    return [int(step) for step in re.findall(rf"^\[CPU{rank}\] Step \[(\d+)/", done.out, re.M)]


def test_both_ranks_go_back_and_train_on_what_came_after(shell: Shell) -> None:
    weights = poisoned(shell, 5, 6, ranks=RANKS, guilty=GUILTY)
    back = train(shell, weights, "ddp", "rollback", 8)
    assert back.code == 0, back.out + back.err
    assert steps_of(back) == [0, 1, 2, 3, 4, 5, 4, 5, 4, 5, 6, 7], "twice back to the checkpoint after step 3"
    assert steps_taken(back, 0) == steps_taken(back, 1) == steps_of(back)
    assert bad_steps(back, GUILTY) == [(5, "rollback"), (5, "rollback")]
    assert bad_steps(back, 0) == []
    again = [record["loss"] for record in back.metrics() if record["step"] == 4]
    assert again == [again[0]] * 3, "the same weights, data and random numbers"
    (found,) = back.verdict()["findings"]
    assert (found["severity"], found["ranks"], found["victims"], found["step"]) == ("warning", [GUILTY], [0], 5)
    assert "observed: the run went back to a checkpoint 2 times, from step 5, 5" in found["evidence"]
    assert back.verdict()["steps_completed"] == 8, "a step that is done again is still one step"
    assert re.search(r"^done: 8 steps, ", back.out, re.M)
    diagnosed = shell.model_check("diagnose", str(back.run_dir))
    assert "completed, exit code 0: 2 ranks, 8 steps: 1 warning" in diagnosed.out
    skipped = train(shell, weights, "ddp", "skip", 10)
    assert good_losses(back) == good_losses(skipped) and len(good_losses(back)) == 8


def test_sharded_ranks_stop_together_after_three_times_without_a_newer_checkpoint(shell: Shell) -> None:
    weights = poisoned(shell, 3, 6, 7, 8, 9, ranks=RANKS, guilty=GUILTY)
    back = train(shell, weights, "fsdp", "rollback", 12)
    assert back.code == 1, back.out + back.err
    assert "Traceback" not in back.out + back.err
    # Each batch that is left out moves those after it forward by one step. The first time has a newer checkpoint after
    # it, and does not count any more.
    assert bad_steps(back, GUILTY) == [(3, "rollback"), *[(5, "rollback")] * 3, (5, "halt")]
    assert bad_steps(back, 0) == []
    assert steps_of(back) == [0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 4, 5, 4, 5]
    assert steps_taken(back, 0) == steps_taken(back, 1) == steps_of(back)
    found = back.verdict()["findings"][0]
    assert (found["severity"], found["ranks"], found["victims"]) == ("error", [GUILTY], [0])
    assert "observed: the run went back to a checkpoint 4 times, from step 3, 5, 5, 5" in found["evidence"]
    why = "the run went back 3 times and got no further than the checkpoint of step 3"
    assert f"observed: {why}, so it stops instead of going back (debug.on_nan)" in back.out
    skipped = train(shell, weights, "fsdp", "skip", 10)
    assert good_losses(back) == good_losses(skipped) and len(good_losses(back)) == 5
