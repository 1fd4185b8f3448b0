"""Out of memory with training.oom_retry: half the micro-batch, twice as many, the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from model_check import DDPTrainer, load_config
from model_check.engine.batches import sample_count
from model_check.engine.memory_retry import check_can_retry, split
from model_check.errors import UsageError
from model_check.plan.layout import Layout


class Limited(nn.Module):
    """A model whose device holds `most` samples at a time; it draws random numbers, as dropout does."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.most = most
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.shape[0])
        torch.rand(1)
        if x.shape[0] > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return ((self.layer(x) - y) ** 2).mean()


def configured(*overrides: str) -> Any:
    return load_config(
        overrides=["training.precision=fp32", "training.learning_rate=0.01", "training.batch_size=8", *overrides]
    )


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(8, 4, generator=generator), "y": torch.randn(8, 1, generator=generator)}] * 4


def losses(most: int, *overrides: str) -> tuple[list[float], Limited]:
    torch.manual_seed(0)
    model = Limited(most)
    result = DDPTrainer(model, configured(*overrides), "cpu", data=batches()).train(num_steps=3)
    return result.losses, model


@pytest.mark.parametrize(("most", "sizes"), [(4, [8, 4, 4]), (2, [8, 4, 2, 2, 2, 2]), (1, [8, 4, 2] + [1] * 8)])
def test_the_losses_are_those_of_a_device_that_holds_everything(most: int, sizes: list[int]) -> None:
    expected, _ = losses(8)
    found, model = losses(most, "training.oom_retry=true")
    assert found == pytest.approx(expected, rel=1e-6)
    assert model.seen[: len(sizes)] == sizes
    assert set(model.seen[len(sizes) :]) == {most}, "a later step starts with what fitted"


def test_without_the_setting_the_error_is_the_scripts_own() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        losses(4)


def test_a_sample_that_does_not_fit_alone_is_an_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB"):
        losses(0, "training.oom_retry=true")


def test_a_sharded_job_is_refused_with_the_remedy() -> None:
    check_can_retry(Layout(strategy="fsdp"))
    with pytest.raises(UsageError, match="oom_retry") as refused:
        check_can_retry(Layout(strategy="fsdp", shard=4))
    assert "parallel.strategy=ddp" in refused.value.remedy


@dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    mask: torch.Tensor | None = None


@settings(deadline=None)
@given(pieces=st.sampled_from([1, 2, 4]), size=st.integers(1, 5), width=st.integers(1, 3))
def test_a_batch_is_cut_into_equal_parts_whatever_its_form(pieces: int, size: int, width: int) -> None:
    rows = pieces * size
    tensor = torch.arange(rows * width).reshape(rows, width)
    forms: list[Any] = [tensor, (tensor, tensor), {"x": tensor, "scale": 2.0}, Sample(tensor), Sample(tensor, tensor)]
    for batch in forms:
        parts = split(batch, pieces)
        assert [sample_count(part) for part in parts] == [size] * pieces
        assert all(type(part) is type(batch) for part in parts)
    assert torch.equal(torch.cat([part["x"] for part in split(forms[2], pieces)]), tensor)
    assert all(part["scale"] == 2.0 for part in split(forms[2], pieces))


# Two ranks train twice: once both hold everything, once the second one runs out of memory.
PROGRAM = """
import json, os, sys
import torch, torch.multiprocessing as mp
from torch import nn
from model_check import DDPTrainer, load_config

class Limited(nn.Module):
    def __init__(self, most):
        super().__init__()
        self.layer, self.most, self.last = nn.Linear(4, 1), most, 0

    def forward(self, x):
        self.last = x.shape[0]
        if x.shape[0] > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.layer(x).square().mean()

def train(number, most):
    torch.manual_seed(0)
    model = Limited(most)
    config = load_config(overrides=["training.precision=fp32", "training.oom_retry=true", "training.batch_size=8"])
    data = [{"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(number))}]
    result = DDPTrainer(model, config, "cpu", rank=number, world_size=2, data=data).train(num_steps=3)
    return result.losses, model.last

def rank(number, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    results[number] = (train(number, 8), train(number, 2 if number == 1 else 8))

if __name__ == "__main__":
    from torch.distributed import TCPStore
    port = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False).port
    results = mp.get_context("fork").Manager().dict()
    mp.start_processes(rank, args=(port, results), nprocs=2, start_method="fork")
    print(json.dumps([results[n] for n in range(2)]))
"""


@pytest.mark.slow
def test_ranks_agree_on_the_size_that_all_of_them_hold(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (whole, first), (_, second) = json.loads(done.stdout.splitlines()[-1])
    assert whole[1] == 8
    assert first[0] == second[0] == pytest.approx(whole[0], rel=1e-6)
    assert (first[1], second[1]) == (2, 2), "the rank that could have held more cuts its batches too"
