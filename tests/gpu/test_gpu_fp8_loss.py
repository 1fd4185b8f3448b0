"""The output projection and cross-entropy in fp8 against float64, on random and on hostile inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model_check.config.shapes import built_in_shape
from model_check.engine.gradient_norm import whole_norm
from model_check.models import build_model
from model_check.models.fp8 import apply_fp8
from model_check.models.loss import IGNORED, fused_linear_cross_entropy, plain_linear_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8"
    ),
]

# e4m3 has 3 mantissa bits and e5m2 has 2: a product of two rounded numbers is off by 2 to 3 % on average.
GRADIENT_ERROR = 0.03


def fp8_loss(*args, **options):
    from model_check.models.loss_fp8 import fp8_linear_cross_entropy

    return fp8_linear_cross_entropy(*args, **options)


def problem(rows: int, width: int, vocabulary: int, ignored: int = 0):
    generator = torch.Generator().manual_seed(rows + vocabulary)
    hidden = torch.randn(rows, width, generator=generator).to("cuda", torch.bfloat16)
    weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to("cuda", torch.bfloat16)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[torch.randperm(rows, generator=generator)[:ignored]] = IGNORED
    return hidden, weight, targets.cuda()


def with_gradients(loss_of, hidden, weight, targets, **options):
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    loss = loss_of(hidden, weight, targets, **options)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def exact(hidden, weight, targets):
    def loss_of(h, w, t):
        return torch.nn.functional.cross_entropy(h @ w.T, t, ignore_index=IGNORED)

    return with_gradients(loss_of, hidden.double(), weight.double(), targets)


def relative_error(ours, truth) -> float:
    return float((ours.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize(("rows", "width", "vocabulary"), [(64, 64, 512), (48, 128, 8208), (1024, 512, 128256)])
@pytest.mark.parametrize("chunk", [None, 32])
def test_loss_and_gradients_are_as_exact_as_fp8_can_be(rows: int, width: int, vocabulary: int, chunk) -> None:
    inputs = problem(rows, width, vocabulary, ignored=9)
    loss, grad_hidden, grad_weight = with_gradients(fp8_loss, *inputs, chunk=chunk)
    truth = exact(*inputs)
    assert relative_error(loss, truth[0]) < 2e-3
    assert relative_error(grad_hidden, truth[1]) < GRADIENT_ERROR
    assert relative_error(grad_weight, truth[2]) < GRADIENT_ERROR
    assert not grad_hidden[inputs[2] == IGNORED].any()


def test_scaling_of_the_loss_reaches_the_gradients() -> None:
    hidden, weight, targets = problem(64, 64, 512)
    plain = with_gradients(fp8_loss, hidden, weight, targets)
    halved = with_gradients(lambda *a: 0.5 * fp8_loss(*a), hidden, weight, targets)
    for ours, other in zip(plain, halved, strict=True):
        torch.testing.assert_close(0.5 * ours, other)


@pytest.mark.parametrize("size", [1e-4, 300.0])
def test_tiny_and_huge_hidden_states_keep_their_accuracy(size: float) -> None:
    hidden, weight, targets = problem(64, 128, 1024)
    inputs = (hidden * size, weight / size, targets)
    for ours, truth in zip(with_gradients(fp8_loss, *inputs), exact(*inputs), strict=True):
        assert relative_error(ours, truth) < GRADIENT_ERROR


def test_a_nan_and_a_wrong_target_reach_the_loss() -> None:
    hidden, weight, targets = problem(64, 64, 512)
    spoilt = hidden.clone()
    spoilt[3, 5] = float("nan")
    assert with_gradients(fp8_loss, spoilt, weight, targets)[0].isnan()
    wrong = targets.clone()
    wrong[7] = 512
    assert with_gradients(fp8_loss, hidden, weight, wrong)[0].isnan()


def test_evaluation_has_the_loss_of_training() -> None:
    hidden, weight, targets = problem(128, 64, 512, ignored=5)
    with torch.no_grad():
        evaluated = fp8_loss(hidden, weight, targets, chunk=32)
    torch.testing.assert_close(evaluated, with_gradients(fp8_loss, hidden, weight, targets, chunk=32)[0])


def test_rows_that_do_not_divide_by_sixteen_take_the_bf16_path() -> None:
    inputs = problem(70, 64, 512)
    for ours, bf16 in zip(
        with_gradients(fp8_loss, *inputs), with_gradients(fused_linear_cross_entropy, *inputs), strict=True
    ):
        assert torch.equal(ours, bf16)


def test_fp8_takes_the_fused_loss_and_leaves_the_plain_one_alone() -> None:
    shape = replace(
        built_in_shape("llama-3.1-8b"), num_layers=1, hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=1
    )
    device = torch.device("cuda")
    fused = apply_fp8(build_model(shape, device, torch.bfloat16))
    assert fused.linear_cross_entropy.__name__ == "fp8_linear_cross_entropy"
    plain = build_model(shape, device, torch.bfloat16)
    plain.linear_cross_entropy = plain_linear_cross_entropy
    assert apply_fp8(plain).linear_cross_entropy is plain_linear_cross_entropy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_of_gradients_equals_the_exact_one(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    sizes = (1, 7, 65536, 65537, 3_000_001)
    gradients = [torch.randn(n, generator=generator, device="cuda").to(dtype) for n in sizes]
    gradients.append(torch.empty(0, dtype=dtype, device="cuda"))
    truth = torch.cat([g.double() for g in gradients]).norm()
    assert abs(float(whole_norm(gradients)) / float(truth) - 1) < 1e-6
    gradients[2][5] = float("inf")
    assert whole_norm(gradients).isinf()
    gradients[2][5] = float("nan")
    assert whole_norm(gradients).isnan()
