"""Where a bad number was made: the operation, the module and the line, in both passes, past everything harmless."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from model_check.numerics.origins import Given, Origin, OriginFinder, range_of
from tests.marked_lines import line_of


class Net(nn.Module):
    """Two named layers and, between them and the loss, whatever a test wants."""

    def __init__(self, tail: Callable[[torch.Tensor], torch.Tensor], wraps: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self._tail = tail
        self._wraps = wraps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.tanh(self.first(x)))
        return checkpoint(self._tail, hidden, use_reentrant=False) if self._wraps else self._tail(hidden)


def find(model: nn.Module, *inputs: torch.Tensor) -> Origin | None:
    finder = OriginFinder(model)
    with finder.watching([(str(n), x) for n, x in enumerate(inputs)]):
        loss = model(*inputs)
        finder.loss_reached(loss)
        loss.backward()
    return finder.origin


def log_of_zero(hidden: torch.Tensor) -> torch.Tensor:
    clipped = torch.relu(hidden) * 0
    return (clipped.log() * clipped).mean()  # log of zero


def slope_at_zero(hidden: torch.Tensor) -> torch.Tensor:
    length = (hidden - hidden.detach()).square().sum().sqrt()  # sqrt of zero
    return length + hidden.mean()


def hidden_behind_where(hidden: torch.Tensor) -> torch.Tensor:
    ratio = hidden / torch.zeros_like(hidden)  # division by zero
    return torch.where(torch.ones_like(hidden, dtype=torch.bool), hidden, ratio).mean()


def infinity_times_zero(hidden: torch.Tensor) -> torch.Tensor:
    huge = (hidden.abs() + 1) * 1e30 * 1e30  # infinite, then masked
    return torch.where(huge > 0, hidden, huge * hidden).mean()


def power_of_zero(hidden: torch.Tensor) -> torch.Tensor:
    return ((hidden - hidden.detach()).abs() ** 0.5).sum()  # root as a power


def in_place(hidden: torch.Tensor) -> torch.Tensor:
    parts = torch.empty(2, *hidden.shape)
    parts[0] = hidden
    parts[1] = (hidden * 1e30) * 1e30  # too large
    return parts.sum()


@pytest.mark.parametrize("wraps", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("tail", "direction", "op", "mark"),
    [
        (log_of_zero, "forward", "log", "log of zero"),
        (slope_at_zero, "backward", "sqrt", "sqrt of zero"),
        (hidden_behind_where, "backward", "div", "division by zero"),
        (infinity_times_zero, "backward", "mul", "infinite, then masked"),
        (power_of_zero, "backward", "pow", "root as a power"),
        (in_place, "forward", "mul", "too large"),
    ],
)
def test_the_operation_and_its_line_are_found(
    tail: Callable[[torch.Tensor], torch.Tensor], direction: str, op: str, mark: str, wraps: bool
) -> None:
    origin = find(Net(tail, wraps), torch.randn(3, 4))
    assert origin is not None
    assert (origin.direction, origin.site.op, origin.site.location) == (direction, op, line_of(__file__, mark))
    assert not origin.received and origin.given is None


def test_the_module_is_named_and_the_ranges_before_it_are_kept() -> None:
    model = Net(torch.sum)
    with torch.no_grad():
        model.second.weight.fill_(1e38)
        model.first.weight.fill_(10.0)
    origin = find(model, torch.full((2, 4), 3.0))
    assert origin is not None
    assert (origin.site.module, origin.site.op, origin.dtype) == ("second", "addmm", "float32")
    assert [entry.module for entry in origin.before] == ["first"]
    before = origin.before[0]
    assert before.input is not None and before.output is not None
    assert before.input.absmax == 3.0 and before.output.absmax == pytest.approx(120, abs=1)


def spectrum(hidden: torch.Tensor) -> torch.Tensor:
    waves = torch.fft.rfft(hidden * 0)
    waves = waves / waves.abs().amax()  # nothing over nothing
    return torch.fft.irfft(waves).sum()


def test_complex_numbers_are_watched_too() -> None:
    origin = find(Net(spectrum), torch.randn(3, 4))
    assert origin is not None
    assert (origin.site.op, origin.site.location) == ("div", line_of(__file__, "nothing over nothing"))
    assert (origin.kind, origin.dtype, origin.received) == ("nan", "complex64", False)


def test_the_mean_of_large_numbers_is_a_number() -> None:
    large = torch.full((64, 64), 3e38)
    assert range_of(large).mean == pytest.approx(3e38)
    large[0, 0] = math.inf
    assert range_of(large).mean == pytest.approx(3e38)


def test_at_most_ten_modules_before_are_kept() -> None:
    layers = [nn.Linear(2, 2) for _ in range(14)]

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return (x * math.inf).sum()

    origin = find(Deep(), torch.ones(1, 2))
    assert origin is not None
    assert [entry.module for entry in origin.before] == [f"layers.{n}" for n in range(4, 14)]


def masked_attention(visible: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def attend(hidden: torch.Tensor) -> torch.Tensor:
        scores = (hidden @ hidden.mT).masked_fill(~visible, -math.inf)
        return (scores.softmax(-1) @ hidden).square().mean()  # attention

    return attend


def test_infinity_in_a_mask_is_meant() -> None:
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    assert find(Net(masked_attention(causal)), torch.randn(3, 4)) is None

    def additive(hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.full((3, 3), -math.inf).triu(1)
        return ((hidden @ hidden.mT + mask).softmax(-1) @ hidden).square().mean()

    assert find(Net(additive), torch.randn(3, 4)) is None


def test_a_mask_may_be_given_as_a_buffer_or_with_the_batch() -> None:
    class Masked(nn.Module):
        mask: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(4, 4)
            self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))

        def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
            hidden = self.project(x)
            return ((hidden @ hidden.mT + self.mask + more).softmax(-1) @ hidden).square().mean()  # both masks

    more = torch.zeros(3, 3)
    more[2, 1] = -math.inf
    assert find(Masked(), torch.randn(3, 4), more) is None
    more[1] = -math.inf
    origin = find(Masked(), torch.randn(3, 4), more)
    assert origin is not None and (origin.site.op, origin.empty_divisor) == ("softmax", True)
    assert origin.site.location == line_of(__file__, "both masks")


def test_a_row_that_sees_nothing_is_a_division_by_an_empty_mask() -> None:
    blind = torch.ones(3, 3, dtype=torch.bool).tril()
    blind[0] = False
    origin = find(Net(masked_attention(blind)), torch.randn(3, 4))
    assert origin is not None
    assert (origin.site.op, origin.kind, origin.empty_divisor) == ("softmax", "nan", True)
    assert origin.site.location == line_of(__file__, "attention")


def test_a_mean_over_nothing_is_a_division_by_an_empty_mask() -> None:
    mask = torch.zeros(3, 4)
    origin = find(Net(lambda h: (h * mask).sum() / mask.sum()), torch.randn(3, 4))
    assert origin is not None and (origin.site.op, origin.empty_divisor) == ("div", True)
    labels = torch.full((3,), -100)
    origin = find(Net(lambda h: F.cross_entropy(h, labels)), torch.randn(3, 4))
    assert origin is not None and (origin.site.op, origin.empty_divisor) == ("nll_loss", True)


@pytest.mark.parametrize("count", [torch.tensor(0), torch.zeros(1, dtype=torch.int32), 0])
def test_a_division_by_a_count_that_is_handed_in_is_one_by_an_empty_mask(count: torch.Tensor | int) -> None:
    origin = find(Net(lambda h: (h * 0).sum() / count), torch.randn(3, 4))
    assert origin is not None and (origin.site.op, origin.empty_divisor) == ("div", True)


@pytest.mark.parametrize("nothing", [torch.tensor(0.0), torch.zeros(4, dtype=torch.int64), 0.0])
def test_a_division_by_a_zero_that_counts_nothing_is_no_empty_mask(nothing: torch.Tensor | float) -> None:
    origin = find(Net(lambda h: (h / (h - h)).sum()), torch.randn(3, 4))
    assert origin is not None and (origin.site.op, origin.empty_divisor) == ("div", False)
    origin = find(Net(lambda h: (h / nothing).sum()), torch.randn(3, 4))
    assert origin is not None and (origin.site.op, origin.empty_divisor) == ("div", False)


def test_what_was_bad_before_the_step_is_named() -> None:
    model = Net(torch.sum)
    with torch.no_grad():
        model.first.bias[1] = math.nan
    origin = find(model, torch.randn(2, 4))
    assert origin is not None and origin.given == Given("parameter", "first.bias")
    assert origin.inputs[0].finite == 0.75
    bad = torch.randn(2, 4)
    bad[1, 2] = math.nan
    origin = find(Net(torch.sum), bad)
    assert origin is not None and origin.given == Given("input", "0")


@pytest.mark.parametrize(("weight", "magnitude"), [(3e4, 1.2e5), (6e4, 2.4e5)])
def test_a_float16_overflow_knows_its_magnitude(weight: float, magnitude: float) -> None:
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(weight)

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.float16):
                return self.inner(x).float().sum()

    origin = find(Half(), torch.ones(2, 4))
    assert origin is not None
    assert (origin.site.module, origin.dtype, origin.kind) == ("inner", "float16", "inf")
    assert origin.magnitude == pytest.approx(magnitude, rel=1e-2)


def test_memory_that_was_never_written_is_not_looked_at() -> None:
    def partly(hidden: torch.Tensor) -> torch.Tensor:
        room = torch.empty(8, 4)
        room.fill_(math.nan)  # what a reused block of memory may hold
        fresh = torch.empty_like(room)
        fresh.copy_(room)
        room[:3] = hidden
        return room[:3].sum()

    assert find(Net(partly), torch.randn(3, 4)) is None


class Unwatched(torch.autograd.Function):
    """Writes its result past torch, as a Triton kernel does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(x)
        np.multiply(x.detach().numpy(), 2, out=result.numpy())
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_what_was_masked_is_not_blamed_for_what_came_from_elsewhere() -> None:
    table = np.array([1.0, math.nan, 3.0, 4.0], dtype=np.float32)

    def tail(hidden: torch.Tensor) -> torch.Tensor:
        logs = torch.where(hidden > 0, (torch.relu(hidden) * 0).log(), torch.zeros_like(hidden))
        masked = torch.where(torch.isinf(logs), torch.zeros_like(logs), logs)
        return ((hidden + masked) * torch.from_numpy(table)).mean()  # nobody saw who wrote it

    origin = find(Net(tail), torch.randn(3, 4))
    assert origin is not None and origin.received
    assert (origin.site.op, origin.site.location) == ("mul", line_of(__file__, "nobody saw who wrote it"))


def test_memory_of_a_freed_tensor_is_not_taken_for_a_new_one() -> None:
    """numpy's memory reaches torch unseen: at the address of a masked tensor it would inherit that tensor's origin."""
    table = np.array([1.0, math.nan, 3.0, 4.0], dtype=np.float32)
    kept: list[torch.Tensor] = []

    def tail(hidden: torch.Tensor) -> torch.Tensor:
        logs = (torch.relu(hidden.detach()) * 0).log()
        address = logs.untyped_storage()._cdata
        masked = torch.where(torch.isinf(logs), torch.zeros_like(logs), logs)
        del logs
        while len(kept) < 1000 and (not kept or kept[-1].untyped_storage()._cdata != address):
            kept.append(torch.from_numpy(table))
        return ((hidden + masked) * kept[-1]).mean()  # at the old address

    origin = find(Net(tail), torch.randn(3, 4))
    assert origin is not None and origin.received
    assert (origin.site.op, origin.site.location) == ("mul", line_of(__file__, "at the old address"))


def as_it_is(spoilt: torch.Tensor) -> torch.Tensor:
    return spoilt


def normalised(spoilt: torch.Tensor) -> torch.Tensor:
    return spoilt * spoilt.square().mean().rsqrt()  # the root is 0, a good number made of bad ones


@pytest.mark.parametrize("between", [as_it_is, normalised])
def test_a_kernel_that_torch_does_not_know_hides_nothing(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def tail(hidden: torch.Tensor) -> torch.Tensor:
        spoilt = (hidden.abs() + 1) * 1e30 * 1e30  # before the kernel
        return Unwatched.apply(between(spoilt)).mean()

    origin = find(Net(tail), torch.randn(3, 4))
    assert origin is not None and not origin.received
    assert (origin.direction, origin.site.op, origin.site.location) == (
        "forward",
        "mul",
        line_of(__file__, "before the kernel"),
    )


def test_a_finite_step_has_no_origin_and_leaves_no_hooks() -> None:
    model = Net(lambda h: h.square().mean())
    assert find(model, torch.randn(3, 4)) is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
