"""The fused loss against the textbook one in float64: value, gradients, ignored rows, scaling, precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_check.errors import ModelError
from model_check.models.loss import IGNORED, fused_linear_cross_entropy, plain_linear_cross_entropy


def problem(rows: int, width: int, vocabulary: int, ignored: int = 0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) * 0.3
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[torch.randperm(rows, generator=generator)[:ignored]] = IGNORED
    return hidden, weight, targets


def with_gradients(
    loss_of: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = loss_of(hidden, weight, targets, **options)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def exact(hidden: Tensor, weight: Tensor, targets: Tensor, denominator: float | None = None) -> tuple[Tensor, ...]:
    """The textbook loss in float64 throughout."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    total = torch.nn.functional.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORED, reduction="sum")
    loss = total / (denominator or max(1, int((targets != IGNORED).sum())))
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 24),
    vocabulary=st.integers(2, 60),
    chunk=st.one_of(st.none(), st.integers(1, 50)),
    ignored_share=st.floats(0, 1),
    seed=st.integers(0, 2**20),
)
def test_equals_the_exact_loss_whatever_the_chunks(
    rows: int, width: int, vocabulary: int, chunk: int | None, ignored_share: float, seed: int
) -> None:
    inputs = problem(rows, width, vocabulary, ignored=int(rows * ignored_share), seed=seed)
    results = with_gradients(fused_linear_cross_entropy, *inputs, chunk=chunk)
    for ours, truth in zip(results, exact(*inputs), strict=True):
        torch.testing.assert_close(ours.double(), truth, atol=2e-6, rtol=1e-5)


def test_the_plain_path_equals_the_exact_loss() -> None:
    inputs = problem(20, 8, 30, ignored=5)
    for ours, truth in zip(with_gradients(plain_linear_cross_entropy, *inputs), exact(*inputs), strict=True):
        torch.testing.assert_close(ours.double(), truth, atol=2e-6, rtol=1e-5)


def test_the_gradient_follows_what_is_done_to_the_loss() -> None:
    hidden, weight, targets = problem(12, 8, 20)
    plain = with_gradients(fused_linear_cross_entropy, hidden, weight, targets)

    def scaled(*args: Tensor) -> Tensor:
        return fused_linear_cross_entropy(*args) * 65536 / 3

    for ours, unscaled in zip(with_gradients(scaled, hidden, weight, targets), plain, strict=True):
        torch.testing.assert_close(ours, unscaled * 65536 / 3, rtol=1e-6, atol=0)


def test_a_batch_without_targets_costs_nothing() -> None:
    hidden, weight, targets = problem(6, 4, 9, ignored=6)
    loss, grad_hidden, grad_weight = with_gradients(fused_linear_cross_entropy, hidden, weight, targets)
    assert loss == 0 and not grad_hidden.any() and not grad_weight.any()


def test_evaluation_gives_the_same_loss_without_a_graph() -> None:
    hidden, weight, targets = problem(12, 8, 20)
    with torch.no_grad():
        loss = fused_linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, fused_linear_cross_entropy(hidden, weight, targets).detach(), rtol=0, atol=0)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets = problem(6, 4, 9)
    hidden.requires_grad_()
    fused_linear_cross_entropy(hidden, weight, targets).backward()
    assert hidden.grad is not None and weight.grad is None


def relative_error(ours: Tensor, truth: Tensor) -> float:
    return float((ours.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("chunk", [512, 64, 16])
def test_bf16_gradients_are_as_exact_as_those_of_the_plain_path(chunk: int) -> None:
    hidden, weight, targets = problem(512, 64, 1000, ignored=50)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    truth = exact(hidden.float(), weight.float(), targets)
    fused = with_gradients(fused_linear_cross_entropy, hidden, weight, targets, chunk=chunk)
    plain = with_gradients(plain_linear_cross_entropy, hidden, weight, targets)
    assert fused[1].dtype == fused[2].dtype == torch.bfloat16
    assert relative_error(fused[0], truth[0]) < 1e-4
    assert relative_error(fused[1], truth[1]) <= 1.2 * relative_error(plain[1], truth[1])
    # Each further chunk rounds the weight's gradient once more: half a bf16 step (2^-9) each, as a random walk.
    roundings = 512 // chunk + 1
    assert relative_error(fused[2], truth[2]) < 2**-9 * roundings**0.5 + relative_error(plain[2], truth[2])


def test_a_bf16_gradient_has_no_bias_from_the_denominator() -> None:
    """1/509 is no bf16 number: rounded before the product it would shrink or stretch the whole gradient."""
    hidden, weight, targets = problem(512, 64, 300, ignored=3)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    truth = exact(hidden.float(), weight.float(), targets)
    ours = with_gradients(fused_linear_cross_entropy, hidden, weight, targets)
    for gradient, true_gradient in zip(ours[1:], truth[1:], strict=True):
        along = float((gradient.double() * true_gradient).sum() / true_gradient.square().sum())
        assert along == pytest.approx(1.0, abs=5e-4)


def test_fp16_keeps_the_gradient_of_improbable_tokens() -> None:
    """A probability of 1e-7 lies among float16's last two numbers; a loss scale of 65536 has to find it intact."""
    weight = torch.zeros(8, 4, dtype=torch.float16)
    weight[0, 0] = 4.0
    hidden = torch.tensor([[4.0, 1.0, 1.0, 1.0]], dtype=torch.float16)
    targets = torch.tensor([0])
    truth = exact(hidden.float(), weight.float(), targets)[2]
    ours = with_gradients(lambda *args: fused_linear_cross_entropy(*args) * 65536, hidden, weight, targets)[2]
    assert truth[1, 1] == pytest.approx(1.1e-7, rel=0.05)
    assert relative_error(ours[1:].double() / 65536, truth[1:]) < 1e-3


def test_fp16_does_not_overflow() -> None:
    """Hidden states whose products, summed over the rows, pass 65504 before the mean brings them back."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(256, 32, generator=generator) + 30).half()
    weight = (torch.randn(4000, 32, generator=generator) * 0.02).half()
    targets = torch.zeros(256, dtype=torch.long)
    truth = exact(hidden.float(), weight.float(), targets)
    scale = 1024.0

    def scaled(*args: Tensor) -> Tensor:
        return fused_linear_cross_entropy(*args) * scale

    ours = with_gradients(scaled, hidden, weight, targets)
    assert ours[2].isfinite().all()
    assert relative_error(ours[1].double() / scale, truth[1]) < 2e-3
    assert relative_error(ours[2].double() / scale, truth[2]) < 2e-3


def test_autocast_computes_in_bf16_and_keeps_float32_gradients() -> None:
    hidden, weight, targets = problem(64, 16, 50)
    truth = exact(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = with_gradients(fused_linear_cross_entropy, hidden, weight, targets)
    assert ours[1].dtype == ours[2].dtype == torch.float32
    assert ours[0] != truth[0].float()
    for mine, true in zip(ours, truth, strict=True):
        assert relative_error(mine, true) < 1e-2


def test_non_finite_logits_reach_the_loss() -> None:
    hidden, weight, targets = problem(4, 4, 9)
    hidden[2, 1] = float("nan")
    assert fused_linear_cross_entropy(hidden, weight, targets).isnan()


@pytest.mark.parametrize("wrong", [9, 12_000, -1])
def test_a_target_outside_the_vocabulary_is_named(wrong: int) -> None:
    hidden, weight, targets = problem(4, 4, 9)
    targets[3] = wrong
    with pytest.raises(ModelError, match=rf"target token {wrong} is outside the vocabulary of 9"):
        fused_linear_cross_entropy(hidden, weight, targets)


def test_asking_for_the_gradients_twice_is_an_error() -> None:
    hidden, weight, targets = problem(4, 4, 9)
    loss = fused_linear_cross_entropy(hidden.requires_grad_(), weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="asked for its gradients twice"):
        loss.backward()
