"""The triton loss kernel on a real GPU against float64, and the fused loss against the plain one."""

from __future__ import annotations

import pytest
import torch

from model_check.models.loss import IGNORED, fused_linear_cross_entropy, plain_linear_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def problem(rows: int, width: int, vocabulary: int, dtype: torch.dtype, ignored: int = 0):
    generator = torch.Generator().manual_seed(rows + vocabulary)
    hidden = torch.randn(rows, width, generator=generator).to("cuda", dtype)
    weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to("cuda", dtype)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[torch.randperm(rows, generator=generator)[:ignored]] = IGNORED
    return hidden, weight, targets.cuda()


def with_gradients(loss_of, hidden, weight, targets, **options):
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    loss = loss_of(hidden, weight, targets, **options)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def exact(hidden, weight, targets):
    return with_gradients(
        lambda h, w, t: torch.nn.functional.cross_entropy(h @ w.T, t, ignore_index=IGNORED),
        hidden.double(),
        weight.double(),
        targets,
    )


def relative_error(ours, truth) -> float:
    return float((ours.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("vocabulary", [2, 97, 512, 8192, 8193, 32000, 128256])
@pytest.mark.parametrize("kernel", ["triton", "torch"])
def test_float32_equals_the_exact_loss(vocabulary: int, kernel: str) -> None:
    inputs = problem(70, 64, vocabulary, torch.float32, ignored=9)
    results = with_gradients(fused_linear_cross_entropy, *inputs, chunk=32, kernel=kernel)
    for ours, truth in zip(results, exact(*inputs), strict=True):
        assert relative_error(ours, truth) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["triton", "torch"])
def test_half_precision_is_as_exact_as_the_plain_path(dtype: torch.dtype, kernel: str) -> None:
    inputs = problem(2048, 512, 32000, dtype, ignored=100)
    truth = exact(*inputs)

    def scaled_loss(*args, **options):
        return fused_linear_cross_entropy(*args, **options) * 1024

    fused = with_gradients(scaled_loss, *inputs, chunk=1024, kernel=kernel)
    plain = with_gradients(lambda *args: plain_linear_cross_entropy(*args) * 1024, *inputs)
    assert relative_error(fused[0] / 1024, truth[0]) < 1e-4
    for ours, theirs, true in zip(fused[1:], plain[1:], truth[1:], strict=True):
        assert relative_error(ours.double() / 1024, true) <= 1.5 * relative_error(theirs.double() / 1024, true)


def test_a_bf16_gradient_has_no_bias_from_the_denominator() -> None:
    """1/509 is no bf16 number: rounded before the product it would shrink or stretch the whole gradient."""
    inputs = problem(512, 64, 300, torch.bfloat16, ignored=3)
    ours, truth = with_gradients(fused_linear_cross_entropy, *inputs), exact(*inputs)
    for gradient, true_gradient in zip(ours[1:], truth[1:], strict=True):
        along = float((gradient.double() * true_gradient).sum() / true_gradient.square().sum())
        assert along == pytest.approx(1.0, abs=5e-4)


def test_float32_master_weights_under_autocast_get_float32_gradients() -> None:
    inputs = problem(1024, 256, 16000, torch.float32)
    truth = exact(*inputs)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        ours = with_gradients(fused_linear_cross_entropy, *inputs, chunk=256)
    assert ours[1].dtype == ours[2].dtype == torch.float32
    assert relative_error(ours[0], truth[0]) < 1e-3
    assert relative_error(ours[1], truth[1]) < 1e-2
    assert relative_error(ours[2], truth[2]) < 1e-2


def test_offsets_beyond_two_gigabytes() -> None:
    """The last rows of a chunk of 16800 x 128256 logits lie past 2**31 elements."""
    from model_check.models.loss_triton import cross_entropy_in_place

    rows, vocabulary = 16800, 128256
    logits = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device="cuda")
    logits[-1, 5] = 20.0
    labels = torch.full((rows,), 5, device="cuda")
    losses = cross_entropy_in_place(logits, labels, IGNORED, torch.ones((), device="cuda"), wants_gradient=True)
    uniform = float(torch.tensor(float(vocabulary)).log())
    torch.testing.assert_close(losses[:-1], torch.full_like(losses[:-1], uniform), atol=1e-4, rtol=0)
    expected = -torch.nn.functional.log_softmax(torch.tensor([20.0] + [0.0] * (vocabulary - 1)), 0)[0]
    # The loss is a difference of two numbers near 20: ten units in their last place.
    assert float(losses[-1]) == pytest.approx(float(expected), abs=10 * 20 * 2**-23)
    assert float(logits[-2, 5]) == pytest.approx(-1.0, abs=0.01)
    assert float(logits[-1, 5]) == pytest.approx(-float(1 - torch.exp(-expected)), abs=1e-3)


def test_ignored_rows_are_zero_and_foreign_labels_are_not_a_number() -> None:
    from model_check.models.loss_triton import cross_entropy_in_place

    logits = torch.randn(4, 1000, device="cuda")
    labels = torch.tensor([3, IGNORED, 1000, 999], device="cuda")
    logits[1, 7] = float("nan")
    losses = cross_entropy_in_place(logits, labels, IGNORED, torch.ones((), device="cuda"), wants_gradient=True)
    assert losses[1] == 0 and not logits[1].any()
    assert losses.isnan().tolist() == [False, False, True, False]


def test_evaluation_leaves_the_logits_alone_and_gives_the_same_loss() -> None:
    hidden, weight, targets = problem(512, 128, 5000, torch.bfloat16)
    with torch.no_grad():
        evaluated = fused_linear_cross_entropy(hidden, weight, targets)
    trained = fused_linear_cross_entropy(hidden.requires_grad_(), weight, targets)
    assert torch.equal(evaluated, trained.detach())


def test_the_fused_loss_never_holds_all_logits() -> None:
    hidden, weight, targets = problem(16384, 256, 65536, torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused_linear_cross_entropy(hidden, weight, targets, chunk=1024).backward()
    grew = torch.cuda.max_memory_allocated() - before
    logits = 16384 * 65536 * 2
    assert grew < logits / 4
