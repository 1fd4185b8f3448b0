"""`debug.on_nan: rollback` on two ranks: all of them go back together, and the data of the bad step stays out.

One rank's share of a global batch holds a token whose embedding is not a number. Going back and leaving that batch out
must give the losses of a run that met the batch, skipped it and went on: both train on the same data in the same order.
"""

from __future__ import annotations

import json
import math
import re
import string
from pathlib import Path
from typing import Any

import pytest
import torch

from model_check.config import load_config, resolve_shape
from model_check.data import BatchLoader, load_tokenizer, prepare
from model_check.engine.data_spec import data_spec
from model_check.models import build_model
from tests.conftest import Outcome, Shell

pytestmark = pytest.mark.slow

RANKS = 2
GUILTY = 1
# Of each of these characters there is one in all the data, so that one global batch can be made bad by itself.
RARE = string.ascii_uppercase + string.digits + string.punctuation
DOCUMENTS = [("abcdefghij" * 6)[n % 10 :] + rare for n, rare in enumerate(RARE)]
SETTINGS = (
    "training.context_length=64",
    "training.batch_size=2",
    "training.learning_rate=1e-3",
    "data.dataset=documents.jsonl",
    "data.tokenizer=bytes",
    "data.samples=null",
    "checkpoint.interval=2",
    "debug.nan=false",
)


def poisoned(shell: Shell, *batches: int) -> Path:
    """Weights that cannot stand one token in the guilty rank's share of each of these global batches."""
    lines = [json.dumps({"text": document}) + "\n" for document in DOCUMENTS]
    (shell.folder / "documents.jsonl").write_text("".join(lines))
    here = {"data.dataset": "documents.jsonl", "data.cache_dir": ".cache/datasets"}
    config = load_config(
        preset="debug", overrides=[*SETTINGS, *(f"{key}={shell.folder / name}" for key, name in here.items())]
    )
    tokens = _tokens(config)
    model = build_model(resolve_shape(config.model, load_tokenizer("bytes").vocab_size), seed=1)
    state = model.state_dict()
    for number in batches:
        elsewhere = set().union(*(seen for key, seen in tokens.items() if key != (number, GUILTY)))
        state["tok_embed.weight"][min(tokens[number, GUILTY] - elsewhere)] = math.nan
    weights = shell.folder / "weights.pt"
    torch.save(state, weights)
    return weights


def _tokens(config: Any) -> dict[tuple[int, int], set[int]]:
    """The tokens that each rank is given in each of the first global batches."""
    cache = prepare(data_spec(config)).train
    seen = {}
    for rank in range(RANKS):
        loader = BatchLoader(
            cache,
            batch_size=config.training.batch_size,
            context_length=config.training.context_length,
            rank=rank,
            world_size=RANKS,
            seed=config.system.seed,
        )
        with loader:
            seen |= {(number, rank): set(next(loader).tokens.flatten().tolist()) for number in range(14)}
    return seen


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
    weights = poisoned(shell, 5, 6)
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
    weights = poisoned(shell, 3, 6, 7, 8, 9)
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
