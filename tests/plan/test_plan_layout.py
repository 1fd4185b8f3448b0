"""Layouts: how ranks are numbered, and what `auto` picks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.config import SHAPES, Config, load_config
from model_check.plan.choice import choose_layout, estimate
from model_check.plan.layout import Layout, data_rank
from model_check.plan.memory import GIB

SHAPE = SHAPES["llama-3.1-8b"]


def config(*overrides: str) -> Config:
    return load_config(
        preset="production",
        overrides=["model.model_path=llama-3.1-8b", "model.num_layers=32", "training.batch_size=1", *overrides],
    )


def choose(settings: Config, ranks: int, *, gpu_gib: int | None, ranks_per_host: int = 8) -> Layout:
    return choose_layout(
        settings,
        ranks,
        ranks_per_host=ranks_per_host,
        parameters=SHAPE.parameters(),
        shape=SHAPE,
        gpu_bytes=None if gpu_gib is None else gpu_gib * GIB,
    )


@given(
    pipeline=st.sampled_from([1, 2, 3]),
    data=st.integers(1, 4),
    tensor=st.sampled_from([1, 2, 4]),
)
def test_every_slice_of_the_data_is_taken_by_one_whole_model(pipeline: int, data: int, tensor: int) -> None:
    settings = config(f"parallel.pipeline={pipeline}", f"parallel.tensor={tensor}")
    world = pipeline * data * tensor
    layout = choose(settings, world, gpu_gib=None)
    assert layout.world_size == world
    slices = [data_rank(settings, rank, world) for rank in range(world)]
    assert sorted(set(slices)) == list(range(data))
    for number in range(data):
        ranks = [rank for rank in range(world) if slices[rank] == number]
        assert len(ranks) == pipeline * tensor
        assert sorted(layout.stage_of(rank) for rank in ranks) == sorted(list(range(pipeline)) * tensor)


def test_tensor_neighbours_share_a_sample() -> None:
    settings = config("parallel.tensor=2")
    assert [data_rank(settings, rank, 4) for rank in range(4)] == [0, 0, 1, 1]


def test_auto_takes_the_simplest_layout_that_fits() -> None:
    small = choose(config("training.context_length=2048"), 8, gpu_gib=180)
    assert (small.strategy, small.replicate, small.shard) == ("ddp", 8, 1)
    assert small.why.startswith("auto: ddp; a rank would need ddp ")
    sharded = choose(config("training.context_length=2048"), 8, gpu_gib=80)
    assert sharded.shard == 8
    assert "of the GPU's 80 GiB" in sharded.why and "may not fit" not in sharded.why


def test_auto_keeps_shards_inside_a_host_where_they_fit() -> None:
    layout = choose(config("training.context_length=2048"), 16, gpu_gib=80)
    assert (layout.strategy, layout.replicate, layout.shard) == ("hsdp", 2, 8)


def test_auto_says_when_nothing_fits() -> None:
    layout = choose(config(), 2, gpu_gib=24)
    assert layout.strategy == "fsdp"
    assert layout.why.endswith("even that may not fit")


@pytest.mark.parametrize(("ranks", "gib", "word"), [(1, 80, "one copy"), (4, None, "no memory of its own")])
def test_auto_is_ddp_where_there_is_nothing_to_weigh(ranks: int, gib: int | None, word: str) -> None:
    layout = choose(config(), ranks, gpu_gib=gib)
    assert layout.strategy == "ddp" and word in layout.why and not layout.shards


def test_gathered_parameters_are_kept_only_where_they_fit() -> None:
    fsdp = ("parallel.strategy=fsdp", "training.context_length=2048")
    assert choose(config(*fsdp), 8, gpu_gib=180).keep_gathered
    assert not choose(config(*fsdp), 8, gpu_gib=40).keep_gathered
    assert not choose(config(*fsdp, "fsdp.reshard=on"), 8, gpu_gib=180).keep_gathered
    assert choose(config(*fsdp, "fsdp.reshard=off"), 8, gpu_gib=40).keep_gathered


def test_recomputation_lowers_the_estimate_in_order() -> None:
    def activations(mode: str) -> float:
        settings = config(f"parallel.activation_checkpointing={mode}")
        return estimate(settings, Layout(), SHAPE.parameters(), SHAPE).moments[0].parts["activations"]

    assert activations("none") > activations("selective") > activations("full") > 0


def test_a_split_model_always_lives_in_shards() -> None:
    assert choose(config("parallel.tensor=2"), 2, gpu_gib=None).shards
    assert choose(config("parallel.pipeline=2"), 2, gpu_gib=None).shards


def test_the_line_for_the_user_names_sizes_and_reason() -> None:
    layout = choose(config("parallel.strategy=hsdp", "parallel.shard=2", "parallel.tensor=2"), 8, gpu_gib=None)
    assert layout.describe() == "hsdp, 2 replicas × 2 shards × 2 tensor (parallel.strategy=hsdp)"


def test_auto_keeps_parameters_whole_for_8bit_states() -> None:
    layout = choose(config("training.optimizer_states=8bit"), 8, gpu_gib=24)
    assert layout.strategy == "ddp" and not layout.shards
    assert layout.why == "auto: ddp, since 8-bit optimizer states need whole parameters"
