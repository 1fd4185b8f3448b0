"""Rotary frequencies: Llama 3.1's scaling at real size, relative positions, and survival of casts and moves."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model_check.config.shapes import SHAPES, ModelShape
from model_check.models import config_from_shape
from model_check.models.rope import RotaryEmbedding, inverse_frequencies, rotate

SMALL = ModelShape(1, 32, 2, 2, 16, 32, 32)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "llama-3.1-8b", "llama-3.2-1b", "llama-3.1-405b"])
def test_frequencies_of_public_models_equal_transformers(name: str) -> None:
    shape = SHAPES[name]
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config_from_shape(shape, torch.bfloat16))).inv_freq
    torch.testing.assert_close(inverse_frequencies(shape), theirs, atol=0.0, rtol=1e-6)


def test_scores_depend_on_relative_positions_alone() -> None:
    rotary = RotaryEmbedding(SMALL)
    query, key = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0)).unbind(0)

    def score(query_at: int, key_at: int) -> float:
        turned = rotate(query, rotary(torch.tensor([query_at]))), rotate(key, rotary(torch.tensor([key_at])))
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)


def test_frequencies_survive_casts_and_empty_moves() -> None:
    expected = inverse_frequencies(SMALL)
    for moved in (
        RotaryEmbedding(SMALL).to(torch.bfloat16),
        RotaryEmbedding(SMALL).half(),
        RotaryEmbedding(SMALL).to("meta").to_empty(device="cpu"),
    ):
        assert moved.frequencies.dtype == torch.float32
        assert torch.equal(moved.frequencies, expected)
    assert "frequencies" not in RotaryEmbedding(SMALL).state_dict()
