"""A foreign script on a GPU: its own gradients are looked at on their way into the exchange, and nobody waits."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from model_check.blackbox.device_numbers import Reading
from model_check.numerics.exchanges import TURNS, Turn
from model_check.numerics.finite import LocalCheck
from model_check.record import RunDir, read_jsonl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# One number of one weight's gradient, which no layer before it feels: only a look at all gradients sees it.
SCRIPT = """
import math, os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

waits, wrapped, bad_step = os.environ["WAITS"] == "1", os.environ["WRAPPED"], int(os.environ["BAD_STEP"])
torch.cuda.set_device(0)
dist.init_process_group("nccl")
step = 0


class Spoilt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if step == bad_step:
            gradient[3:4, 5:6].fill_(math.nan)
        return gradient


class Middle(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, Spoilt.apply(self.weight), self.bias)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), Middle(4096, 4096), nn.ReLU(), nn.Linear(4096, 1)).cuda()
if wrapped == "ddp":
    model = DDP(model)
elif wrapped == "fsdp":
    from torch.distributed.fsdp import fully_shard
    fully_shard(model[2])
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
batch = torch.randn(32768, 1024, device="cuda")  # the host runs ahead
for step in range(12):
    torch.cuda.set_sync_debug_mode("error" if 2 <= step < bad_step and not waits else "default")
    loss = model(batch).square().mean()
    loss.backward()
    if waits:
        torch.cuda.synchronize()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.set_sync_debug_mode("default")
dist.destroy_process_group()
"""

# In the eighth step the first group of eight is read, which holds the bad number.
ITS_TURN, NOT_ITS_TURN = 8, 4


def run(
    folder: Path,
    *,
    waits: bool = False,
    wrapped: str = "ddp",
    bad_step: int = ITS_TURN,
    guard: str = "observe",
) -> list[dict[str, Any]]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    run_dir = RunDir(folder / "run")
    switches = {"WAITS": str(int(waits)), "WRAPPED": wrapped, "BAD_STEP": str(bad_step)}
    flags = ["--nproc", "1", "--guard", guard, "--run-dir", str(run_dir.root)]
    ended = subprocess.run(
        [sys.executable, "-m", "model_check", "run", *flags, str(script)],
        env={**os.environ, **switches},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    records = read_jsonl(run_dir.events(0)).records
    assert [record for record in records if record["event"] == "guard_failed"] == []
    return [record for record in records if record["event"] == "nonfinite"]


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp", "none"])
def test_a_bad_gradient_is_known_a_step_later_with_its_own_step(tmp_path: Path, wrapped: str) -> None:
    (event,) = run(tmp_path, wrapped=wrapped)
    assert (event["step"], event["cause"], event["direction"]) == (ITS_TURN, "MC402", "backward")
    assert event["tensor"] == ("gradients of 4.bias to 2.weight" if wrapped == "ddp" else "gradient of 2.weight")
    late = "inferred: the weights were overwritten before a check that makes nobody wait could know"
    assert event["evidence"][1] == late


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp", "none"])
def test_a_full_look_waits_for_no_turn_and_makes_nobody_wait(tmp_path: Path, wrapped: str) -> None:
    (event,) = run(tmp_path, wrapped=wrapped, bad_step=NOT_ITS_TURN, guard="full")
    told = (event["step"], event["cause"], event["direction"], event["action"])
    assert told == (NOT_ITS_TURN, "MC402", "backward", "observe")
    assert event["tensor"] == ("gradients of 4.bias to 2.weight" if wrapped == "ddp" else "gradient of 2.weight")


def test_without_it_the_same_step_goes_by_unseen(tmp_path: Path) -> None:
    """Told from the weight that it spoilt, and one step late."""
    (event,) = run(tmp_path, bad_step=NOT_ITS_TURN)
    assert (event["step"], event["tensor"]) == (NOT_ITS_TURN + 1, "parameter 2.weight")
    assert "--guard full" in event["fix"][0]


def test_where_the_script_waits_for_the_device_the_step_is_replayed_in_time(tmp_path: Path) -> None:
    (event,) = run(tmp_path, waits=True)
    assert (event["step"], event["cause"], event["deterministic"]) == (ITS_TURN, "MC402", True)
    assert "2.weight" in event["evidence"][0]
    assert "derivative of Spoilt is NaN" in " ".join(event["evidence"])


def test_a_healthy_script_never_waits_and_is_left_alone(tmp_path: Path) -> None:
    assert run(tmp_path, bad_step=99) == []


@pytest.fixture
def late_check() -> LocalCheck:
    """One whose own stream is far behind the script's."""
    check = LocalCheck(torch.device("cuda", 0))
    check.begin()
    check.look_beside(torch.zeros(1, device="cuda"))
    with check.beside():
        torch.cuda._sleep(200_000_000)
    return check


def spoilt_bucket() -> torch.Tensor:
    bucket = torch.ones(1 << 24, device="cuda")
    bucket[12345] = float("nan")
    return bucket


def test_a_look_beside_sees_what_was_there_before_the_exchange_writes_to_it(late_check: LocalCheck) -> None:
    bucket = spoilt_bucket()
    behind = late_check.look_beside(bucket)
    with torch.cuda.stream(behind):
        bucket.zero_()
    torch.cuda.synchronize()
    assert late_check.sums()[1].isnan()


def test_memory_that_is_still_to_be_looked_at_is_not_lent_again(late_check: LocalCheck) -> None:
    late_check.look_beside(spoilt_bucket())
    others = [torch.zeros(1 << 24, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert late_check.sums()[1].isnan()
    assert not any(other.any() for other in others)


def test_the_next_step_does_not_overwrite_an_answer_that_is_late(late_check: LocalCheck) -> None:
    late_check.look_beside(spoilt_bucket())
    with late_check.beside():
        answer = Reading.of(late_check.sums())
    late_check.begin()
    late_check.look(torch.zeros(1, device="cuda"))
    late_check.look(torch.zeros(1, device="cuda"))
    assert math.isnan(answer.value()[1])
    assert late_check.sums().tolist() == [0.0, 0.0]


def test_a_part_of_a_bucket_is_looked_at_beside_too(late_check: LocalCheck) -> None:
    bucket = torch.zeros(1 << 24, device="cuda")
    bucket[1 << 20 : (1 << 20) + 4096] = float("nan")
    part = Turn(5, 20).of_bucket(bucket, 20)
    assert part is not None and part.numel() == bucket.numel() // TURNS
    behind = late_check.look_beside(part)
    with torch.cuda.stream(behind):
        bucket.zero_()
    torch.cuda.synchronize()
    assert late_check.sums()[1].isnan()


def test_what_is_looked_at_beside_keeps_nobody_waiting(late_check: LocalCheck) -> None:
    late_check.look_beside(spoilt_bucket())
    with late_check.beside():
        answered = torch.cuda.Event()
        answered.record()
    torch.cuda.current_stream().synchronize()
    assert not answered.query()
    torch.cuda.synchronize()
    assert answered.query()
