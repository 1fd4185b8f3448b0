"""Attention backends on a real GPU against float32 mathematics, plain and compiled, with and without documents."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from model_check.config.shapes import ModelShape
from model_check.models import apply_compile, build_model
from model_check.models.attention import _import_problem, resolve_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = ModelShape(2, 512, 8, 2, 64, 1024, 1000)
BF16 = torch.bfloat16


def gradients_of(backend: str, dtype: torch.dtype, compiled: bool = False, documents: torch.Tensor | None = None):
    model = build_model(SHAPE, "cuda", dtype, seed=1, init_std=0.1, attention_backend=backend)
    if compiled:
        torch._dynamo.reset()
        apply_compile(model)
    tokens = torch.randint(0, 1000, (2, 512), generator=torch.Generator().manual_seed(0)).cuda()
    loss = model(tokens, tokens.roll(-1, 1), document_ids=documents)
    loss.backward()
    wq, wv = model.layers[0].attention.wq.weight.grad, model.layers[0].attention.wv.weight.grad
    assert wq is not None and wv is not None
    return loss.detach().float(), wq.float(), wv.float()


def documents() -> torch.Tensor:
    return (torch.arange(512, device="cuda") // 200).expand(2, -1)


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "cudnn", "flash", "flex"])
def test_backends_agree_with_float32(backend: str, compiled: bool) -> None:
    truth = gradients_of("math", torch.float32)
    limits = [1e-3 + 1.5 * relative_error(a, b) for a, b in zip(gradients_of("math", BF16), truth, strict=True)]
    for ours, true, limit in zip(gradients_of(backend, BF16, compiled), truth, limits, strict=True):
        assert relative_error(ours, true) < limit


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_flash_attention_4_agrees_with_float32_and_repeats_its_bits(compiled: bool) -> None:
    pytest.importorskip("flash_attn.cute.interface")
    test_backends_agree_with_float32("flash_attn_4", compiled)
    first, second = (gradients_of("flash_attn_4", BF16, compiled) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "flex"])
def test_documents_agree_with_float32(backend: str, compiled: bool) -> None:
    truth = gradients_of("math", torch.float32, documents=documents())
    rounded = gradients_of("math", BF16, documents=documents())
    limits = [1e-3 + 1.5 * relative_error(a, b) for a, b in zip(rounded, truth, strict=True)]
    for ours, true, limit in zip(gradients_of(backend, BF16, compiled, documents()), truth, limits, strict=True):
        assert relative_error(ours, true) < limit


def test_auto_takes_the_fastest_that_fits() -> None:
    device = torch.device("cuda", 0)
    hopper = torch.cuda.get_device_capability(0) >= (9, 0)
    newest = "flash_attn_4" if _import_problem("flash_attn.cute.interface") is None else "cudnn"
    assert resolve_backend("auto", device, BF16, 128, False) == (newest if hopper else "flash")
    assert resolve_backend("auto", device, BF16, 256, False) == "flash"
    assert resolve_backend("auto", device, torch.float32, 128, False) == "sdpa"
    assert resolve_backend("auto", device, BF16, 128, True) == "flex"


def test_weights_of_a_gpu_model_follow_from_seed_and_name() -> None:
    first, second = build_model(SHAPE, "cuda", seed=3), build_model(replace(SHAPE, num_layers=4), "cuda", seed=3)
    name = "layers.1.feed_forward.w1.weight"
    assert torch.equal(first.state_dict()[name], second.state_dict()[name])
    assert first.rotary.frequencies.is_cuda
