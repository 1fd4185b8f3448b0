"""The loader: order from (seed, epoch) alone, disjoint ranks, exact resume."""

from __future__ import annotations

import threading
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_check.data import BatchLoader, Cursor, check_rank_slices
from model_check.data.packed import PackedCache
from model_check.data.permutation import Permutation
from model_check.errors import DataError
from tests.data.conftest import MakeCache

CONTEXT = 4
with_fixtures = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(size=st.integers(1, 5000), seed=st.integers(-(2**40), 2**70), epoch=st.integers(0, 1000))
def test_the_permutation_is_one_to_one(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed, epoch)(np.arange(size))
    np.testing.assert_array_equal(np.sort(order), np.arange(size))


@given(size=st.integers(2**40, 2**50), start=st.integers(0, 2**39))
def test_a_huge_permutation_costs_its_slice(size: int, start: int) -> None:
    order = Permutation(size, 0, 0)
    places = np.arange(start, start + 500)
    found = order(places)
    assert len(np.unique(found)) == 500
    assert found.min() >= 0 and found.max() < size
    np.testing.assert_array_equal(order(places[100:200]), found[100:200])


def test_the_permutation_looks_random() -> None:
    size = 10_000
    one, two = Permutation(size, 0, 0)(np.arange(size)), Permutation(size, 0, 1)(np.arange(size))
    for order in (one, two):
        assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.04
        assert (np.diff(order) == 1).mean() < 0.001
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.04
    assert (one == two).mean() < 0.001


def test_a_batch_holds_the_tokens_of_its_samples(make_cache: MakeCache) -> None:
    cache = make_cache(101)
    batch = next(BatchLoader(cache, batch_size=3, context_length=CONTEXT))
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.tokens.shape == batch.targets.shape == (3, CONTEXT)
    for row, sample in enumerate(batch.sample_ids.tolist()):
        assert batch.tokens[row].tolist() == list(range(sample * CONTEXT, sample * CONTEXT + CONTEXT))
        assert batch.targets[row].tolist() == list(range(sample * CONTEXT + 1, sample * CONTEXT + CONTEXT + 1))
    assert batch.document_ids is None and batch.positions is None


def test_every_token_but_the_first_is_a_target_once_an_epoch(make_cache: MakeCache) -> None:
    cache = make_cache(81)
    loader = BatchLoader(cache, batch_size=5, context_length=CONTEXT)
    targets = torch.cat([batch.targets.flatten() for batch in islice(loader, 4)])
    assert sorted(targets.tolist()) == list(range(1, 81))
    assert loader.cursor == Cursor(1, 0)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(samples, ranks, batch, accumulation) with at least one global batch."""
    world, batch, accumulation = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return draw(st.integers(world * batch * accumulation, 200)), world, batch, accumulation


def _global_batch(loaders: list[BatchLoader], accumulation: int) -> list[list[int]]:
    """Samples each rank takes for one step."""
    return [[s for _ in range(accumulation) for s in next(loader).sample_ids.tolist()] for loader in loaders]


def _ranks(cache: PackedCache, world: int, batch: int, accumulation: int, **more: object) -> list[BatchLoader]:
    return [
        BatchLoader(cache, batch, CONTEXT, rank, world, grad_accum=accumulation, **more)  # type: ignore[arg-type]
        for rank in range(world)
    ]


@with_fixtures
@given(layout=layouts(), seed=st.integers(0, 10))
def test_ranks_are_disjoint_and_an_epoch_repeats_no_sample(
    make_cache: MakeCache, layout: tuple[int, int, int, int], seed: int
) -> None:
    samples, world, batch, accumulation = layout
    loaders = _ranks(make_cache(samples * CONTEXT + 1), world, batch, accumulation, seed=seed)
    seen: list[int] = []
    for _ in range(samples // (world * batch * accumulation)):
        assert loaders[0].cursor.epoch == 0
        step = _global_batch(loaders, accumulation)
        check_rank_slices(step)
        seen += [sample for rank in step for sample in rank]
    assert len(seen) == len(set(seen))
    assert set(seen) <= set(range(samples))
    assert {loader.cursor for loader in loaders} == {Cursor(1, 0)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_two_and_four_ranks_see_the_same_global_batches(make_cache: MakeCache, num_workers: int) -> None:
    cache = make_cache(1001 * CONTEXT)
    teams = {world: _ranks(cache, world, 3, 4 // world, seed=7, num_workers=num_workers) for world in (1, 2, 4)}
    for _ in range(200):  # through several ends of epoch
        batches = {
            world: {sample for rank in _global_batch(team, 4 // world) for sample in rank}
            for world, team in teams.items()
        }
        assert batches[1] == batches[2] == batches[4]
        assert len(batches[1]) == 12
    assert teams[1][0].cursor.epoch == 2
    assert len({loader.cursor for team in teams.values() for loader in team}) == 1
    for team in teams.values():
        for loader in team:
            loader.close()


@with_fixtures
@given(layout=layouts(), steps=st.integers(0, 12), num_workers=st.sampled_from([0, 1, 3]), seek=st.booleans())
def test_a_cursor_continues_exactly_also_with_other_ranks(
    make_cache: MakeCache, layout: tuple[int, int, int, int], steps: int, num_workers: int, seek: bool
) -> None:
    samples, world, batch, accumulation = layout
    cache = make_cache(samples * CONTEXT + 1)
    whole = BatchLoader(cache, world * batch * accumulation, CONTEXT, seed=3)
    loaders = _ranks(cache, world, batch, accumulation, seed=3, num_workers=num_workers)
    try:
        for _ in range(steps):
            next(whole)
            _global_batch(loaders, accumulation)
        assert whole.cursor == loaders[0].cursor
        if accumulation > 1:
            next(loaders[0])  # an unfinished global batch is not part of the cursor
            assert whole.cursor == loaders[0].cursor
        alone = BatchLoader(cache, world * batch * accumulation, CONTEXT, seed=3, cursor=loaders[0].cursor)
        if seek:
            alone = BatchLoader(cache, world * batch * accumulation, CONTEXT, seed=3, num_workers=num_workers)
            next(alone)
            alone.seek(loaders[0].cursor)
        for _ in range(3):
            expected, found = next(whole), next(alone)
            assert torch.equal(expected.sample_ids, found.sample_ids)
            assert torch.equal(expected.tokens, found.tokens)
        alone.close()
    finally:
        for loader in loaders:
            loader.close()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_worker_threads_change_nothing_but_who_assembles(make_cache: MakeCache, num_workers: int) -> None:
    cache = make_cache(5000)
    here = BatchLoader(cache, 4, 16, seed=1, document_mask=True)
    ahead = BatchLoader(cache, 4, 16, seed=1, document_mask=True, num_workers=num_workers)
    before = threading.active_count()
    for _ in range(150):
        one, two = next(here), next(ahead)
        assert torch.equal(one.tokens, two.tokens)
        assert torch.equal(one.targets, two.targets)
        assert here.cursor == ahead.cursor
    assert before < threading.active_count() <= before + num_workers
    ahead.close()
    assert threading.active_count() == before
    assert torch.equal(next(here).tokens, next(ahead).tokens)
    ahead.close()


def test_another_seed_and_another_epoch_give_another_order(make_cache: MakeCache) -> None:
    cache = make_cache(4001)

    def order(seed: int, epoch: int) -> list[int]:
        return next(BatchLoader(cache, 500, 8, seed=seed, cursor=Cursor(epoch, 0))).sample_ids.tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)
    assert sorted(order(0, 0)) == sorted(order(0, 1)) == list(range(500))


@with_fixtures
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), context=st.integers(1, 24))
def test_documents_and_positions(make_cache: MakeCache, lengths: list[int], context: int) -> None:
    tokens = sum(lengths)
    if tokens <= context:
        lengths, tokens = [*lengths, context], tokens + context
    cache = make_cache(tokens, lengths)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    start_of = np.repeat(np.cumsum(lengths) - lengths, lengths)
    batch = next(BatchLoader(cache, cache.samples(context), context, document_mask=True))
    assert batch.document_ids is not None and batch.positions is not None
    for row, sample in enumerate(batch.sample_ids.tolist()):
        window = np.arange(sample * context, sample * context + context)
        assert batch.document_ids[row].tolist() == document_of[window].tolist()
        expected = window - np.maximum(start_of[window], sample * context)
        assert batch.positions[row].tolist() == expected.tolist()


def test_too_little_data_for_a_global_batch(make_cache: MakeCache) -> None:
    with pytest.raises(DataError, match="5 samples of 4 tokens, fewer than one global batch of 6") as caught:
        BatchLoader(make_cache(21), batch_size=1, context_length=4, world_size=2, grad_accum=3)
    assert caught.value.code == "MC904"


def test_a_rank_beyond_the_world(make_cache: MakeCache) -> None:
    with pytest.raises(DataError, match="rank 2 is not one of 2 ranks"):
        BatchLoader(make_cache(21), batch_size=1, context_length=4, rank=2, world_size=2)


def test_the_same_shard_on_two_ranks_is_named() -> None:
    check_rank_slices([[1, 2], [3, 4]])
    with pytest.raises(DataError, match="ranks 0 and 2 were given the same sample 2") as caught:
        check_rank_slices([[1, 2], [3, 4], [5, 2]])
    assert caught.value.code == "MC903"
