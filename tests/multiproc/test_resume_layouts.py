"""A checkpoint of one layout continues under another: the same losses on the same samples, none skipped or repeated.

Ranks are forked, not launched: what is tested is what they compute and which samples they are given.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity import TOLERANCE
from model_check import load_config
from model_check.checkpoint.peers import Peers
from model_check.data import Cursor, prepare
from model_check.engine.data_and_shape import data_spec
from model_check.engine.feed import open_loader
from model_check.engine.loop import StepInfo
from model_check.engine.place import Place
from model_check.engine.saving import Saving
from model_check.engine.session import Batches
from model_check.engine.worker import assemble, continue_from, fit
from tests.models.test_models_parallelize import on_ranks

BATCH = 4
STEPS = 10
CUT = 6  # the checkpoint is that of the first six steps
WHOLE = ("parallel.strategy=ddp",)
FSDP = ("parallel.strategy=fsdp",)
TENSOR = ("parallel.tensor=2",)
PIPELINE = ("parallel.pipeline=2",)


class Watched:
    """A loader that remembers which samples it gave out."""

    def __init__(self, loader: Batches) -> None:
        self._loader = loader
        self.given: list[list[int]] = []

    @property
    def cursor(self) -> Cursor:
        return self._loader.cursor

    @property
    def identity(self) -> dict[str, Any]:
        return self._loader.identity

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self.given.append(batch.sample_ids.tolist())
            yield batch

    def seek(self, cursor: Cursor) -> None:
        self._loader.seek(cursor)

    def close(self) -> None:
        self._loader.close()


@dataclass(frozen=True)
class Ran:
    """What the ranks of one job saw: losses by step, and the samples of each global batch."""

    losses: dict[int, float]
    samples: list[list[int]]
    notes: list[str]


def run(folder: Path, ranks: int, keys: tuple[str, ...], *, until: int, resume: str | None = None) -> Ran:
    """Trains to step `until`, saving the last one, from scratch or from the newest checkpoint in the folder."""
    config = load_config(
        preset="debug",
        overrides=[
            f"training.global_batch={BATCH}",
            "training.batch_size=1",
            "training.context_length=32",
            "training.learning_rate=1e-3",
            "data.samples=60",
            "data.tokenizer=bytes",
            "model.vocab_size=258",
            f"data.cache_dir={folder / 'cache'}",
            f"checkpoint.dir={folder / 'checkpoints'}",
            "checkpoint.interval=1000",
            "checkpoint.keep_best=false",
            *keys,
        ],
    )
    data = prepare(data_spec(config))

    def work(rank: int) -> tuple[dict[int, float], list[list[int]], int, list[str]]:
        place = Place(rank, ranks)
        loader = Watched(open_loader(config, place, data.train))
        session = assemble(config, place, loader)
        peers = Peers()
        lineage, notes = continue_from(resume, session, peers)
        saving = Saving(session, peers, name="run", last_step=until, lineage=lineage)
        infos: list[StepInfo] = []
        fit(session, on_step=infos.append, max_steps=until, saving=saving)
        assert saving.committed == until - 1
        return {i.step: i.loss for i in infos}, loader.given, session.layout.data_parallel, notes

    answers = on_ranks(ranks, work)
    losses, _, data_parallel, notes = answers[0]
    # Ranks that share a model share their samples, and here such ranks are all of the job: the first speaks for them.
    speakers = answers[:data_parallel]
    accumulation = BATCH // data_parallel
    batches = [
        sorted(s for _, given, _, _ in speakers for micro in given[at : at + accumulation] for s in micro)
        for at in range(0, len(losses) * accumulation, accumulation)
    ]
    return Ran(losses, batches, notes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("undisturbed"), 1, WHOLE, until=STEPS)


@pytest.fixture(scope="module")
def saved_by_fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    run(folder, 2, FSDP, until=CUT)
    return folder


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        pytest.param(2, WHOLE, id="ddp2", marks=pytest.mark.slow),
        pytest.param(2, TENSOR, id="tp2"),
        pytest.param(2, PIPELINE, id="pp2", marks=pytest.mark.slow),
        pytest.param(4, FSDP, id="fsdp4", marks=pytest.mark.slow),
        pytest.param(1, WHOLE, id="single"),
    ],
)
def test_a_checkpoint_of_two_shards_continues_under_another_layout(
    ranks: int, keys: tuple[str, ...], saved_by_fsdp: Path, undisturbed: Ran, tmp_path: Path
) -> None:
    shutil.copytree(saved_by_fsdp, tmp_path / "run", symlinks=True)
    rest = run(tmp_path / "run", ranks, keys, until=STEPS, resume="auto")
    assert list(rest.losses) == list(range(CUT, STEPS))
    expected = {step: undisturbed.losses[step] for step in rest.losses}
    assert rest.losses == pytest.approx(expected, rel=TOLERANCE)
    assert rest.samples == undisturbed.samples[CUT:]
    assert any("MC606" in note for note in rest.notes) == (ranks != 2)


@pytest.mark.slow
def test_four_two_one_and_four_ranks_see_every_sample_once(undisturbed: Ran, tmp_path: Path) -> None:
    losses: dict[int, float] = {}
    samples: list[list[int]] = []
    for ranks, until in ((4, 3), (2, 5), (1, 7), (4, STEPS)):
        part = run(tmp_path, ranks, WHOLE, until=until, resume="auto" if losses else None)
        losses.update(part.losses)
        samples += part.samples
    assert samples == undisturbed.samples
    assert len({sample for batch in samples for sample in batch}) == STEPS * BATCH, "a sample came twice"
    assert losses == pytest.approx(undisturbed.losses, rel=TOLERANCE)
