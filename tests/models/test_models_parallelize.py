"""Cutting a model from outside: same weights, same names, same losses and gradients, on real ranks (gloo)."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from model_check.config.shapes import ModelShape
from model_check.errors import ModelError
from model_check.models import (
    Llama,
    apply_compile,
    build_meta_model,
    build_model,
    initialize,
    load_pretrained,
    plain_linear_cross_entropy,
)
from model_check.models.context import apply_context_parallel, slice_positions
from model_check.models.loss import IGNORED
from model_check.models.parallelize import apply_fully_shard
from model_check.models.pipeline import keep_stage, layers_of_stage
from model_check.models.recompute import apply_activation_checkpointing
from model_check.models.tensor import VocabularyParallelLoss, apply_tensor_parallel
from tests.models.exported import export

SHAPE = ModelShape(3, 64, 4, 2, 16, 192, 256)
TOKENS = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))


def _rank(rank: int, world: int, port: int, work: Callable[[int], Any], answers: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world)
        answers.put((rank, "ok", work(rank)))
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, "failed", traceback.format_exc()))


def on_ranks(world: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returned on each of `world` forked ranks, which share one gloo group."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(r, world, port, work, answers)) for r in range(world)]
    for process in ranks:
        process.start()
    try:
        got = sorted(answers.get(timeout=60) for _ in ranks)
    finally:
        for process in ranks:
            process.join(timeout=10)
            process.kill()
    assert [state for _, state, _ in got] == ["ok"] * world, "\n".join(text for _, s, text in got if s == "failed")
    return [answer for _, _, answer in got]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def numbers(model: Llama) -> tuple[float, dict[str, list[float]]]:
    """Loss, and sum and norm of every weight's gradient."""
    loss = model(TOKENS[:, :-1], TOKENS[:, 1:])
    loss.backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {name: [g.sum().item(), g.norm().item()] for name, g in gradients.items()}


def assert_same(found: tuple[float, dict[str, list[float]]], expected: tuple[float, dict[str, list[float]]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        # A sum over thousands of gradients nearly cancels: its error is measured against their norm.
        assert found[1][name] == pytest.approx(values, rel=1e-4, abs=1e-4 * values[1]), name


def expected(shape: ModelShape = SHAPE) -> tuple[float, dict[str, list[float]]]:
    return numbers(build_model(shape, seed=7))


def cut(shape: ModelShape, shard: int, tensor: int, recompute: Any = "none") -> Llama:
    mesh = init_device_mesh("cpu", (shard, tensor), mesh_dim_names=("shard", "tensor"))
    model = build_meta_model(shape)
    if tensor > 1:
        apply_tensor_parallel(model, mesh["tensor"])
    apply_activation_checkpointing(model, recompute)
    apply_fully_shard(model, mesh["shard"], compute_dtype=None, reshard=True, cpu_offload=False)
    model.to_empty(device="cpu")
    initialize(model, seed=7)
    return model


@pytest.mark.parametrize(("shard", "tensor"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_shards_and_slices_compute_what_the_whole_model_does(shard: int, tensor: int, tied: bool) -> None:
    shape = ModelShape(3, 64, 4, 2, 16, 192, 256, tie_embeddings=tied)
    reference = build_model(shape, seed=7)

    def work(rank: int) -> Any:
        model = cut(shape, shard, tensor)
        same = all(torch.equal(whole(p), reference.get_parameter(n)) for n, p in model.named_parameters())
        return same, numbers(model)

    for same, found in on_ranks(shard * tensor, work):
        assert same, "the weights depend on the layout"
        assert_same(found, expected(shape))


def test_a_rank_holds_its_part_only() -> None:
    def work(rank: int) -> int:
        return sum(p.to_local().numel() for p in cut(SHAPE, 2, 1).parameters())  # type: ignore[union-attr]

    assert on_ranks(2, work) == [SHAPE.parameters() // 2] * 2


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_blocks_give_the_same_gradients(mode: Any) -> None:
    model = build_model(SHAPE, seed=7)
    names = list(model.state_dict())
    apply_activation_checkpointing(model, mode)
    assert list(model.state_dict()) == names
    assert_same(numbers(model), expected())


def kept_bytes(model: Llama) -> int:
    """Bytes that the forward pass saves for the backward pass, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(4, 64, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.hidden_states(tokens)
    return sum(kept.values())


def test_full_recomputation_keeps_little() -> None:
    plain, full = build_model(SHAPE), apply_activation_checkpointing(build_model(SHAPE), "full")
    assert kept_bytes(full) < 0.35 * kept_bytes(plain)


def test_selective_recomputation_repeats_few_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def flops(mode: Any) -> int:
        model = apply_activation_checkpointing(build_model(SHAPE), mode)
        with FlopCounterMode(display=False) as counter:
            model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
        return counter.get_total_flops()

    none, selective, full = flops("none"), flops("selective"), flops("full")
    # Of the seven matrices selective repeats the narrow wk and wv and one of the wide w1 and w3.
    repeated = 2 * TOKENS[:, 1:].numel() * SHAPE.num_layers * (2 * 64 * 32 + 64 * 192)
    assert selective - none == repeated
    assert full > selective


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_compiled_blocks_of_slices_have_every_gradient(mode: Any) -> None:
    """The embedding's comes through a sum over the slices, which a compiled block must not be handed unfinished."""

    def work(rank: int) -> Any:
        torch._dynamo.reset()
        mesh = init_device_mesh("cpu", (2,))
        model = apply_tensor_parallel(build_meta_model(SHAPE), mesh)
        apply_compile(apply_activation_checkpointing(model, mode), backend="aot_eager")
        model.to_empty(device="cpu")
        initialize(model, seed=7)
        return numbers(model)

    for found in on_ranks(2, work):
        assert_same(found, expected())


def test_compiled_blocks_recompute_and_shard() -> None:
    def work(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (1,))
        model = apply_activation_checkpointing(build_meta_model(SHAPE), "full")
        apply_compile(model, backend="aot_eager")
        apply_fully_shard(model, mesh, compute_dtype=None, reshard=True, cpu_offload=False)
        model.to_empty(device="cpu")
        initialize(model, seed=7)
        return numbers(model)

    assert_same(on_ranks(1, work)[0], expected())


@pytest.mark.parametrize(("layers", "stages", "sizes"), [(3, 2, [2, 1]), (8, 3, [3, 3, 2]), (4, 4, [1, 1, 1, 1])])
def test_stages_take_all_layers_in_order(layers: int, stages: int, sizes: list[int]) -> None:
    parts = [layers_of_stage(layers, stage, stages) for stage in range(stages)]
    assert [number for part in parts for number in part] == list(range(layers))
    assert [len(part) for part in parts] == sizes


def test_stages_in_a_row_are_the_whole_model() -> None:
    stages = [keep_stage(build_meta_model(SHAPE), stage, 2).to_empty(device="cpu") for stage in range(2)]
    for stage in stages:
        initialize(stage, seed=7)
    names = [name for stage in stages for name in stage.state_dict()]
    assert sorted(names) == sorted(build_meta_model(SHAPE).state_dict()), "each weight lives on one stage"
    loss = stages[1](stages[0](TOKENS[:, :-1]), targets=TOKENS[:, 1:])
    assert loss.item() == expected()[0]


@pytest.mark.parametrize("stages", [2, 4])
def test_a_model_that_cannot_be_staged_says_why(stages: int) -> None:
    shape = ModelShape(3, 64, 4, 2, 16, 192, 256, tie_embeddings=stages == 2)
    with pytest.raises(ModelError, match="tied embeddings" if stages == 2 else "3 layers cannot be cut"):
        keep_stage(build_meta_model(shape), 0, stages)


def test_the_vocabulary_parallel_loss_ignores_and_divides_as_the_plain_one() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(2, 5, 8, generator=generator), torch.randn(12, 8, generator=generator)
    targets = torch.randint(0, 12, (2, 5), generator=generator)
    targets[0, 1] = targets[1, 4] = IGNORED

    def gradients(loss_of: Any, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h, w = hidden.clone().requires_grad_(), matrix.requires_grad_()
        loss = loss_of(h, w, targets)
        (loss * 5).backward()
        return loss.detach(), h.grad, w.grad.to_local() if isinstance(w.grad, DTensor) else w.grad

    def work(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        rows = distribute_tensor(weight, mesh, [Shard(0)])
        return [tensor.tolist() for tensor in gradients(VocabularyParallelLoss(mesh), rows)]

    answers = [tuple(torch.tensor(values) for values in answer) for answer in on_ranks(2, work)]
    loss, for_hidden, for_weight = gradients(plain_linear_cross_entropy, weight)
    for found_loss, found_hidden, _ in answers:
        assert torch.allclose(found_loss, loss, rtol=1e-6)
        assert torch.allclose(found_hidden, for_hidden, atol=1e-5)
    assert torch.allclose(torch.cat([rows for *_, rows in answers]), for_weight, atol=1e-5)


@given(ranks=st.integers(1, 8), piece=st.integers(1, 5))
def test_context_slices_are_a_fair_partition(ranks: int, piece: int) -> None:
    length = 2 * ranks * piece
    slices = [slice_positions(length, rank, ranks) for rank in range(ranks)]
    assert sorted(torch.cat(slices).tolist()) == list(range(length))
    looked_at = {int((positions + 1).sum()) for positions in slices}
    assert len(looked_at) == 1, "all ranks look at the same number of keys"


def test_context_slices_compute_what_the_whole_model_does() -> None:
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    whole = build_model(SHAPE, seed=7)
    expected_logits = whole(tokens[:, :-1]).tolist()

    def work(rank: int) -> Any:
        model = apply_context_parallel(build_model(SHAPE, seed=7), dist.group.WORLD, rank, 2)
        kept = slice_positions(32, rank, 2)
        return kept.tolist(), model(tokens[:, :-1][:, kept], positions=kept).tolist()

    for kept, logits in on_ranks(2, work):
        assert torch.allclose(torch.tensor(logits), torch.tensor(expected_logits)[:, kept], atol=1e-5)


def test_sizes_that_tensor_ranks_cannot_share_are_named() -> None:
    shape = ModelShape(1, 64, 4, 2, 16, 192, 255)

    def work(rank: int) -> str:
        with pytest.raises(ModelError) as caught:
            apply_tensor_parallel(build_meta_model(shape), init_device_mesh("cpu", (2,)))
        return str(caught.value)

    assert set(on_ranks(2, work)) == {
        "vocab_size=255 cannot be cut over parallel.tensor=2 ranks; choose a parallel.tensor that divides 255"
    }


def test_pretrained_weights_go_into_shards_slices_and_stages(tmp_path: Path) -> None:
    source = build_model(SHAPE, seed=11)
    export(source, tmp_path / "hf")

    def work(rank: int) -> bool:
        model = cut(SHAPE, 2, 2)
        load_pretrained(model, tmp_path / "hf")
        return all(torch.equal(whole(p), source.get_parameter(n)) for n, p in model.named_parameters())

    assert on_ranks(4, work) == [True] * 4
    stage = keep_stage(build_meta_model(SHAPE), 1, 2).to_empty(device="cpu")
    load_pretrained(stage, tmp_path / "hf")
    assert all(torch.equal(p, source.get_parameter(n)) for n, p in stage.named_parameters())
