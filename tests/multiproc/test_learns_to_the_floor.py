"""A healthy run ends where the data's entropy says it must: neither above (not learning) nor below (cheating)."""

from __future__ import annotations

import statistics

import pytest

from model_check.config import load_config
from model_check.data import entropy_floor
from model_check.engine.data_and_shape import data_spec
from tests.conftest import Shell

SETTINGS = (
    "training.learning_rate=3e-3",
    "training.context_length=128",
    "training.batch_size=8",
    "training.max_steps=160",
    "training.scheduler.type=cosine",
    "training.scheduler.warmup_steps=20",
    "data.samples=null",
)


@pytest.mark.slow
def test_two_cpu_ranks_reach_the_entropy_of_the_synthetic_text(shell: Shell) -> None:
    sets = [word for value in SETTINGS for word in ("--set", value)]
    done = shell.train("--nproc", "2", *sets)
    assert done.code == 0, done.err
    floor = entropy_floor(data_spec(load_config(preset="debug", overrides=SETTINGS)))
    # One batch holds 2,000 tokens, whose mean entropy itself scatters by about 1 %: the mean of the last 20 does not.
    reached = statistics.mean(done.losses()[-20:])
    assert reached == pytest.approx(floor, rel=0.03)
    assert reached > floor * 0.995, "below the entropy: the model sees what it should predict"
    assert f"floor {floor:.4f}" in done.out
