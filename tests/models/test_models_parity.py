"""The model against transformers' LlamaForCausalLM on the same random weights: logits, loss, gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model_check.config.shapes import ModelShape, RopeScaling
from model_check.models import Llama, build_model, config_from_shape, hugging_face_name

GROUPED = ModelShape(
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=112,
    vocab_size=97,
    max_position=256,
)
SHAPES = {
    "multi_head": replace(GROUPED, num_kv_heads=4, rope_theta=10_000.0),
    "grouped": GROUPED,
    "one_kv_head": replace(GROUPED, num_kv_heads=1),
    "wide_heads": replace(GROUPED, head_dim=32),
    "tied": replace(GROUPED, tie_embeddings=True),
    # The original context is short, so that all three branches of the scaling are met within 16 channels.
    "llama_3_1": replace(GROUPED, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)),
}


def transformers_twin(model: Llama, attention: str = "sdpa") -> LlamaForCausalLM:
    config = LlamaConfig(**config_from_shape(model.shape, torch.float32), attn_implementation=attention)
    twin = LlamaForCausalLM(config)
    weights = {hugging_face_name(name): value for name, value in model.state_dict().items()}
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if model.shape.tie_embeddings else set())
    return twin


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def model(request: pytest.FixtureRequest) -> Llama:
    # A wider initialisation than training uses: near-zero weights would hide a wrong rotation behind flat attention.
    return build_model(request.param, seed=1, init_std=0.2)


@pytest.mark.parametrize("length", [1, 2, 17, 128])
def test_logits_equal_transformers(model: Llama, length: int) -> None:
    tokens = torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        ours, theirs = model(tokens), transformers_twin(model)(tokens).logits
    assert theirs.std() > 0.3
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_loss_and_gradients_equal_transformers(model: Llama) -> None:
    tokens = torch.randint(0, 97, (3, 33), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, :9] = -100
    twin = transformers_twin(model)
    theirs = twin(tokens, labels=labels).loss
    theirs.backward()
    # transformers shifts the labels itself; here the caller does.
    ours = model(tokens[:, :-1], labels[:, 1:])
    ours.backward()

    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    their_gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for name, parameter in model.named_parameters():
        expected = their_gradients[hugging_face_name(name)]
        assert parameter.grad is not None and expected is not None
        assert expected.abs().max() > 1e-5, f"{name} has no gradient to compare"
        torch.testing.assert_close(parameter.grad, expected, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_bf16_logits_are_as_near_to_float32_as_those_of_transformers() -> None:
    precise = build_model(GROUPED, seed=2, init_std=0.1)
    rounded = build_model(GROUPED, seed=2, init_std=0.1, dtype=torch.bfloat16)
    tokens = torch.randint(0, 97, (2, 64), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        truth = precise(tokens)
        ours = (rounded(tokens).float() - truth).abs().mean()
        theirs = (transformers_twin(precise).to(torch.bfloat16)(tokens).logits.float() - truth).abs().mean()
    assert ours <= 1.1 * theirs


def test_explicit_positions_move_the_rotation() -> None:
    model = build_model(SHAPES["llama_3_1"], seed=1, init_std=0.2)
    tokens = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    spread = torch.arange(20) * 3
    with torch.no_grad():
        expected = transformers_twin(model)(tokens, position_ids=spread.expand(2, -1)).logits
        for positions in (spread, spread.expand(2, -1)):
            torch.testing.assert_close(model(tokens, positions=positions), expected, atol=2e-5, rtol=1e-5)
        assert not torch.allclose(model(tokens), expected, atol=1e-3)
