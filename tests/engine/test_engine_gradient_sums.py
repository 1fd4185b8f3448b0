"""The gradients of a step with many micro-batches are summed in fp32, whatever the parameters are stored in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from model_check.engine.passes import WholeModel, replicate
from model_check.engine.place import Place
from model_check.engine.precision import Precision
from model_check.engine.split_adamw import SplitAdamW
from model_check.engine.step import TrainStep
from tests.models.test_models_parallelize import on_ranks

CPU = torch.device("cpu")
BF16 = Precision("bf16", torch.bfloat16, None, "cpu")


class Net(nn.Module):
    """Two matrices and a norm; the loss is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 32)
        self.norm = nn.RMSNorm(32)
        self.second = nn.Linear(32, 1)
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(torch.tanh(self.first(x)))).float().square().mean()


def batches(count: int, seed: int = 1) -> list[torch.Tensor]:
    """Similar batches, so that gradients do not cancel and lost precision shows."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(4, 16, generator=generator)
    return [(base + 0.05 * torch.randn(4, 16, generator=generator)).to(torch.bfloat16) for _ in range(count)]


def exact_sum(micro_batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """The fp64 sum of the gradients that each micro-batch has on its own."""
    model = Net()
    totals = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
    for batch in micro_batches:
        model.zero_grad(set_to_none=True)
        (model(batch) / len(micro_batches)).backward()
        for total, parameter in zip(totals, model.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad.double()
    return totals


def off_by(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The error of the worst parameter, as a fraction of its gradient's norm."""
    pairs = zip(found, exact, strict=True)
    return max(float((f.double() - e).norm() / e.norm()) for f, e in pairs)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def step_of(model: nn.Module, place: Place | None = None) -> TrainStep:
    optimizer = SplitAdamW(model.parameters())
    place = place or Place()
    return TrainStep(model, optimizer, BF16, place, max_grad_norm=1.0, passes=WholeModel(model, BF16, CPU))


@pytest.mark.parametrize("count", [64, 2048])
def test_a_sum_over_micro_batches_loses_nothing(count: int) -> None:
    micro_batches = batches(count)
    exact = exact_sum(micro_batches)
    in_bf16 = Net()
    for batch in micro_batches:
        (in_bf16(batch) / count).backward()
    assert off_by(gradients(in_bf16), exact) > 5e-3, "what is tested here does not matter"
    step = step_of(Net())
    norm = step(micro_batches, 1e-3)[1].item()
    assert off_by(gradients(step.model), exact) < 1e-4
    assert norm == pytest.approx(float(torch.stack([e.norm() for e in exact]).norm()), rel=1e-4)


def test_one_micro_batch_has_no_sum() -> None:
    """Even after a step that had several, the gradients are what the backward pass left."""
    step = step_of(Net())
    plain = copy.deepcopy(step.model)
    step(batches(4), 0.0)
    step(batches(1), 0.0)
    plain(batches(1)[0]).backward()
    for parameter, expected in zip(step.model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
        assert torch.equal(parameter.grad, expected.grad)
        assert not parameter._post_accumulate_grad_hooks


def test_a_step_that_breaks_off_leaves_no_sum_behind() -> None:
    """After running out of memory in the second micro-batch, the repeated step must not begin with half a sum."""
    step, whole = step_of(Net()), step_of(Net())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        step([batches(1)[0], torch.ones(4, 3, dtype=torch.bfloat16)], 0.0)
    for train_step in (step, whole):
        train_step(batches(3), 0.0)
    assert all(map(torch.equal, gradients(step.model), gradients(whole.model)))


@pytest.mark.parametrize("count", [64, 1])
def test_replicas_exchange_the_fp32_sum(count: int) -> None:
    """Four ranks, with small buckets, so that some hold several parameters and some hold one."""

    def work(rank: int) -> dict[str, Any]:
        place = Place(rank, 4)
        replica = replicate(Net(), place)
        step = step_of(replica, place)
        first = step(batches(count, seed=rank), 0.0)
        found = gradients(replica)
        again = step(batches(count, seed=rank), 0.0)
        same = torch.equal(first, again) and all(map(torch.equal, found, gradients(replica)))
        return {"gradients": [g.float().numpy() for g in found], "dtype": str(found[0].dtype), "same": same}

    answers = on_ranks(4, work)
    exact = [sum(parts) / 4 for parts in zip(*(exact_sum(batches(count, seed=rank)) for rank in range(4)), strict=True)]
    for answer in answers:
        found = [torch.from_numpy(g) for g in answer["gradients"]]
        assert off_by(found, exact) < (1e-4 if count > 1 else 1e-2)
        assert answer["dtype"] == ("torch.float32" if count > 1 else "torch.bfloat16")
        assert answer["same"], "a step repeated must have the same bits"
