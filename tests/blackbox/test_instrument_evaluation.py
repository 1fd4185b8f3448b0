"""A long evaluation: thousands of forwards without a step stay visible, and do not fill the ring."""

from __future__ import annotations

from itertools import pairwise

from model_check.blackbox.current_phase import BEYOND_THEM_EVERY_S, FORWARDS_PER_STEP
from tests.blackbox.observed_runs import Runner

SECONDS = 2.5
SCRIPT = f"""
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8).eval()
end, done = time.monotonic() + {SECONDS}, 0
with torch.no_grad():
    while time.monotonic() < end:
        model(torch.ones(2, 8))
        done += 1
print(done)
"""


def test_forwards_beyond_those_of_a_step_are_recorded_now_and_then(run: Runner) -> None:
    outcome = run(SCRIPT, world=1)
    assert outcome.codes == [0], outcome.errors
    done = int(outcome.outputs[0].split()[-1])
    ends = [crumb.time_ns / 1e9 for crumb in outcome.crumbs(event="end", phase="forward")]
    later = ends[FORWARDS_PER_STEP:]
    assert done > 10 * FORWARDS_PER_STEP
    assert SECONDS / BEYOND_THEM_EVERY_S / 2 <= len(later) <= SECONDS / BEYOND_THEM_EVERY_S + 1
    assert all(b - a >= 0.9 * BEYOND_THEM_EVERY_S for a, b in pairwise(later))
