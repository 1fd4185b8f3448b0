"""CommunicationProfiler: bytes agree with those worked out by hand, and time is counted once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_check.blackbox.communication_profiler import Interval, bus_factor, busy, message_bytes
from tests.blackbox.observed_runs import plain_environment

SCRIPT = Path(__file__).parent / "comms_script.py"
ROOT = Path(__file__).resolve().parents[2]
STEPS, WIDTH, RANKS, FLOAT = 3, 32, 2, 4
BLOCK_BYTES = 2 * (WIDTH * 4 * WIDTH) * FLOAT  # up and down, no bias
MODEL_BYTES = 2 * BLOCK_BYTES


@pytest.fixture(scope="module")
def stats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [*torchrun, str(SCRIPT)],
        env={**plain_environment(), "PYTHONPATH": str(ROOT)},
        cwd=tmp_path_factory.mktemp("comms"),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_ddp_reduces_every_gradient_once_a_step(stats: dict[str, Any]) -> None:
    reduced = stats["ddp"]["collectives"]["all_reduce"]
    assert reduced["bytes"] == STEPS * MODEL_BYTES
    assert (reduced["untimed"], stats["ddp"]["steps"]) == (0, STEPS)
    assert reduced["bus_gb_per_s"] == pytest.approx(reduced["algorithm_gb_per_s"]), "2(n-1)/n is 1 for two ranks"
    assert reduced["bytes"] / reduced["seconds"] / 1e9 == pytest.approx(reduced["algorithm_gb_per_s"])


@pytest.mark.slow
def test_fsdp_gathers_parameters_twice_and_scatters_gradients_once(stats: dict[str, Any]) -> None:
    kinds = stats["fsdp"]["collectives"]
    assert kinds["all_gather"]["bytes"] == STEPS * 2 * MODEL_BYTES, "for the forward pass and again for the backward"
    assert kinds["reduce_scatter"]["bytes"] == STEPS * MODEL_BYTES
    assert (kinds["all_gather"]["count"], kinds["reduce_scatter"]["count"]) == (STEPS * 4, STEPS * 2)
    assert kinds["reduce_scatter"]["untimed"] == 0 and kinds["reduce_scatter"]["seconds"] > 0
    assert kinds["all_gather"]["bus_gb_per_s"] == pytest.approx(kinds["all_gather"]["algorithm_gb_per_s"] / 2)


NESTED = """
import torch
from model_check import CommunicationProfiler

class Careful(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)

class Twice(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner
    def step(self, closure=None):
        self.inner.step()
        self.inner.step()

weights = [torch.nn.Parameter(torch.ones(2))]
plain = torch.optim.SGD(weights, lr=0.1)
for optimizer in (plain, Careful(weights, lr=0.1), Twice(plain)):
    with CommunicationProfiler(enabled=True) as profiler:
        for _ in range(3):
            optimizer.step()
        print(profiler.get_stats().steps)
"""


@pytest.mark.slow
def test_an_optimizer_that_calls_another_makes_one_step() -> None:
    environment = {**plain_environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", NESTED], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["3", "3", "3"]


@pytest.mark.slow
def test_tensor_parallelism_reduces_activations(stats: dict[str, Any]) -> None:
    """Each block's output in the forward pass; in the backward the input of the second block, the first needs none."""
    activation = 4 * WIDTH * FLOAT
    assert stats["tp"]["collectives"]["all_reduce"]["bytes"] == STEPS * 3 * activation


@pytest.mark.slow
def test_shares_are_of_the_whole_time_and_nothing_is_counted_after_close(stats: dict[str, Any]) -> None:
    for kind in ("ddp", "fsdp", "tp"):
        told = stats[kind]
        assert 0 < told["seconds"] <= sum(one["seconds"] for one in told["collectives"].values()) * (1 + 1e-9)
        assert 0 < told["share_of_step"] <= 1 and 0 <= told["overlap"] <= 1
        assert told["bytes_per_step"] == told["bytes"] / STEPS
        assert told["barriers_after_close"] == 1
    assert stats["off"] == {}


@pytest.mark.slow
def test_overlap_tells_hidden_from_exposed(stats: dict[str, Any]) -> None:
    assert stats["overlap"]["hidden"] > 3 * stats["overlap"]["exposed"]


def test_time_under_several_calls_is_counted_once() -> None:
    calls = [Interval(0, 2, 10, 11), Interval(1, 3, 10.5, 11.5), Interval(1.5, 1.6, 0, 0), Interval(5, 6, 20, 20)]
    assert busy(calls) == (4.0, 1.5)
    assert busy([]) == (0.0, 0.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=20))
def test_busy_time_is_the_number_of_covered_instants(calls: list[tuple[int, int]]) -> None:
    covered = {second for start, length in calls for second in range(start, start + length)}
    intervals = [Interval(start, start + length, start, start + length) for start, length in calls]
    assert busy(intervals) == (len(covered), len(covered))


@pytest.mark.parametrize(
    ("op", "size", "message", "factor"),
    [
        ("all_reduce", 4, 100, 1.5),
        ("all_gather", 4, 400, 0.75),
        ("reduce_scatter", 8, 800, 7 / 8),
        ("all_to_all", 2, 100, 0.5),
        ("broadcast", 4, 100, 1.0),
        ("all_reduce", 1, 100, 0.0),
    ],
)
def test_sizes_and_factors_are_those_of_nccl_tests(op: str, size: int, message: int, factor: float) -> None:
    assert message_bytes(op, 100, size) == message
    assert bus_factor(op, size) == factor


@pytest.mark.slow
def test_the_profiler_is_found_where_the_earlier_guides_import_it() -> None:
    program = (
        "from src.benchmark.communication import CommunicationProfiler as theirs\n"
        "from model_check import CommunicationProfiler as ours\n"
        "assert theirs is ours\n"
        "print(ours(enabled=True).get_stats().to_dict()['collectives'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "{}\n", done.stderr
