"""Building: weights follow from (seed, name) alone; shapes, bad inputs, compile and the small stand-in model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from model_check.config.shapes import SHAPES, ModelShape
from model_check.errors import ModelError
from model_check.models import Llama, SimpleModel, apply_compile, build_model

SHAPE = ModelShape(3, 64, 4, 2, 16, 96, 61)


def tokens_of(shape: ModelShape, *size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, shape.vocab_size, size, generator=torch.Generator().manual_seed(seed))


def test_a_parameter_depends_on_the_seed_and_its_name_alone() -> None:
    model, deeper = build_model(SHAPE, seed=7), build_model(replace(SHAPE, num_layers=5, tie_embeddings=True), seed=7)
    other = build_model(SHAPE, seed=8)
    mine, theirs, reseeded = model.state_dict(), deeper.state_dict(), other.state_dict()
    name = "layers.1.attention.wq.weight"
    assert torch.equal(mine[name], theirs[name])
    assert torch.equal(mine["tok_embed.weight"], theirs["tok_embed.weight"])
    assert not torch.equal(mine[name], reseeded[name])
    assert not torch.equal(mine[name], mine["layers.2.attention.wq.weight"])


def test_building_neither_reads_nor_moves_the_global_generator() -> None:
    torch.manual_seed(1)
    first = build_model(SHAPE, seed=3)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(first.tok_embed.weight, build_model(SHAPE, seed=3).tok_embed.weight)


def test_the_spread_of_each_kind_of_weight() -> None:
    model = build_model(replace(SHAPE, hidden_size=256, num_layers=2), init_std=0.05)
    block = model.layers[1]
    assert torch.equal(model.norm.weight, torch.ones(256))
    assert torch.equal(block.ffn_norm.weight, torch.ones(256))
    for weight, std in (
        (model.tok_embed.weight, 0.05),
        (model.output_weight, 0.05),
        (block.attention.wq.weight, 0.05),
        (block.feed_forward.w1.weight, 0.05),
        (block.attention.wo.weight, 0.05 / math.sqrt(4)),
        (block.feed_forward.w2.weight, 0.05 / math.sqrt(4)),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.03)
        assert abs(weight.mean().item()) < 0.001


def test_a_bf16_model_is_the_rounding_of_the_float32_one() -> None:
    precise, rounded = build_model(SHAPE, seed=5), build_model(SHAPE, seed=5, dtype=torch.bfloat16)
    for (name, a), (_, b) in zip(precise.named_parameters(), rounded.named_parameters(), strict=True):
        assert b.dtype == torch.bfloat16 and torch.equal(a.bfloat16(), b), name


def test_names_are_those_of_the_earlier_guides() -> None:
    names = set(build_model(SHAPE).state_dict())
    assert {"tok_embed.weight", "norm.weight", "output.weight", "layers.0.attention_norm.weight"} <= names
    assert {f"layers.2.attention.{w}.weight" for w in ("wq", "wk", "wv", "wo")} <= names
    assert {f"layers.2.feed_forward.{w}.weight" for w in ("w1", "w2", "w3")} <= names
    assert len(names) == 3 + 3 * 9
    assert "output.weight" not in build_model(replace(SHAPE, tie_embeddings=True)).state_dict()


@pytest.mark.parametrize("name", SHAPES)
def test_every_built_in_shape_builds_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        model = Llama(replace(SHAPES[name], num_layers=2))
    assert sum(parameter.numel() for parameter in model.parameters()) == model.shape.parameters()


def test_shapes_that_cannot_be_computed_are_refused() -> None:
    with pytest.raises(ModelError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        Llama(replace(SHAPE, num_kv_heads=3))
    with pytest.raises(ModelError, match="head_dim=15 is odd"):
        Llama(replace(SHAPE, head_dim=15))


@pytest.mark.parametrize("wrong", [61, -3])
def test_a_token_outside_the_vocabulary_is_named(wrong: int) -> None:
    with pytest.raises(ModelError, match=f"input token {wrong} is outside the vocabulary of 61"):
        build_model(SHAPE)(torch.tensor([[0, wrong, 5]]))


def test_a_few_steps_learn_a_fixed_batch() -> None:
    model = build_model(SHAPE)
    tokens = tokens_of(SHAPE, 2, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = last = float("inf")
    for step in range(30):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first, last = (loss.item() if step == 0 else first), loss.item()
    assert first == pytest.approx(math.log(61), rel=0.03)
    assert last < 0.2


def test_compiled_blocks_share_one_graph_and_keep_their_names() -> None:
    plain, compiled = build_model(SHAPE), build_model(SHAPE)
    names = list(compiled.state_dict())
    torch._dynamo.reset()
    counters.clear()
    # aot_eager runs dynamo and the autograd split as inductor does, without a C++ compiler.
    apply_compile(compiled, backend="aot_eager")
    tokens = tokens_of(SHAPE, 2, 16)
    expected, loss = plain(tokens, tokens), compiled(tokens, tokens)
    expected.backward()
    loss.backward()
    # One graph for all three blocks, one for the last norm.
    assert counters["stats"]["unique_graphs"] == 2
    assert list(compiled.state_dict()) == names
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    for (name, a), b in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    torch._dynamo.reset()


@pytest.mark.slow
def test_inductor_compiles_the_blocks_on_the_cpu() -> None:
    plain, compiled = build_model(SHAPE), build_model(SHAPE)
    torch._dynamo.reset()
    apply_compile(compiled)
    tokens = tokens_of(SHAPE, 2, 16)
    expected, loss = plain(tokens, tokens), compiled(tokens, tokens)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(compiled.tok_embed.weight.grad, plain.tok_embed.weight.grad, atol=1e-6, rtol=1e-3)
    torch._dynamo.reset()


def test_the_simple_model_learns_a_mapping_and_ignores_masked_targets() -> None:
    torch.manual_seed(0)
    model = SimpleModel(hidden_size=16, num_layers=2, vocab_size=11)
    tokens = torch.arange(11).unsqueeze(0)
    targets = (tokens * 3) % 11
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    assert torch.equal(model(tokens).argmax(-1), targets)
    masked = targets.clone()
    masked[0, 1:] = -100
    expected = -model(tokens).log_softmax(-1)[0, 0, targets[0, 0]]
    torch.testing.assert_close(model(tokens, masked), expected)
