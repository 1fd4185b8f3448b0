"""Attention backends: what each computes, what auto picks, and the sentence where one cannot run."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from model_check.config.shapes import ModelShape
from model_check.errors import ModelError
from model_check.models import Llama, build_model
from model_check.models.attention import attend, build_mask, resolve_backend

SHAPE = ModelShape(2, 64, 4, 2, 16, 96, 61)
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def heads(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def reference(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Softmax over allowed positions, written out position by position."""
    batch, length, num_heads, head_dim = query.shape
    group = num_heads // key.shape[2]
    output = torch.empty_like(query)
    for b in range(batch):
        for t in range(length):
            seen = [s for s in range(t + 1) if documents[b, s] == documents[b, t]]
            for h in range(num_heads):
                scores = key[b, seen, h // group] @ query[b, t, h] / head_dim**0.5
                output[b, t, h] = scores.softmax(0) @ value[b, seen, h // group]
    return output


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("backend", ["sdpa", "math", "flash", "flex"])
def test_causal_attention_equals_the_written_out_sum(backend: str, kv_heads: int) -> None:
    query, key, value = heads(2, 13, 4, 8), heads(2, 13, kv_heads, 8), heads(2, 13, kv_heads, 8) + 0.5
    one_document = torch.zeros(2, 13, dtype=torch.long)
    with torch.no_grad():
        mask = build_mask(backend, one_document, None)
        output = attend(query.float(), key.float(), value.float(), backend, mask)
    torch.testing.assert_close(output.double(), reference(query, key, value, one_document), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "math", "flex"])
def test_documents_are_kept_apart(backend: str) -> None:
    query, key, value = heads(2, 12, 4, 8), heads(2, 12, 2, 8), heads(2, 12, 2, 8) + 0.5
    documents = torch.tensor([[0] * 5 + [1] * 7, [3] + [4] * 10 + [5]])
    with torch.no_grad():
        mask = build_mask(backend, documents, documents)
        output = attend(query.float(), key.float(), value.float(), backend, mask)
    torch.testing.assert_close(output.double(), reference(query, key, value, documents), atol=1e-5, rtol=1e-5)


def test_a_packed_row_computes_what_its_documents_compute_alone() -> None:
    model = build_model(SHAPE, seed=1, init_std=0.2)
    tokens = torch.randint(0, 61, (1, 20), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 8 + [1] * 12])
    positions = torch.cat((torch.arange(8), torch.arange(12))).unsqueeze(0)
    with torch.no_grad():
        packed = model(tokens, positions=positions, document_ids=documents)
        alone = torch.cat((model(tokens[:, :8]), model(tokens[:, 8:])), dim=1)
        mixed = model(tokens)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(packed[:, 8:], mixed[:, 8:], atol=1e-2)


def test_auto_on_the_cpu_is_sdpa() -> None:
    assert resolve_backend("auto", CPU, torch.float32, 64, documents=False) == "sdpa"
    assert resolve_backend("auto", CPU, torch.bfloat16, 64, documents=True) == "sdpa"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "documents", "sentence"),
    [
        ("cudnn", "cpu", torch.bfloat16, 64, False, "needs a CUDA device, and the model is on cpu"),
        ("cudnn", "cuda", torch.float32, 64, False, "computes in bf16 or fp16, and the model runs in float32"),
        ("cudnn", "cuda", torch.bfloat16, 256, False, "takes heads up to 128 wide, not 256"),
        ("flex", "cuda", torch.bfloat16, 8, False, "takes heads from 16 wide, not 8"),
        ("cudnn", "cuda", torch.bfloat16, 128, True, "cannot keep packed documents apart"),
        ("flash", "cpu", torch.float32, 64, True, "cannot keep packed documents apart"),
    ],
)
def test_a_backend_that_does_not_fit_says_why(
    name: str, device: str, dtype: torch.dtype, head_dim: int, documents: bool, sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence) as caught:
        resolve_backend(name, torch.device(device), dtype, head_dim, documents)
    assert caught.value.remedy


def test_an_unknown_backend_is_refused_at_construction() -> None:
    with pytest.raises(ModelError, match="'flashy' is not a backend; choose one of auto, sdpa, cudnn"):
        Llama(SHAPE, attention_backend="flashy")


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
@pytest.mark.parametrize("backend", ["flash_attn", "flash_attn_4"])
def test_a_kernel_that_is_not_installed_names_its_package(backend: str) -> None:
    package = backend.replace("_", "-")
    with pytest.raises(
        ModelError, match=rf"needs the {package} package, which is not installed; pip install .*{package}"
    ):
        Llama(SHAPE, attention_backend=backend)


def test_training_with_flex_on_the_cpu_says_that_it_cannot() -> None:
    model = build_model(SHAPE, attention_backend="flex")
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(ModelError, match="no backward pass on the CPU"):
        model(tokens, tokens)
