"""`model-check bench`: the numbers add up, the JSON has what the table shows, mistakes are one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.cli.bench import _sizes
from model_check.cli.main import main
from model_check.doctor.bench.training import summarised
from model_check.errors import UsageError
from model_check.record.metrics import StepMetrics


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *words, "--json"])
    captured = capsys.readouterr()
    assert stopped.value.code in (0, None), captured.err
    answer: dict[str, Any] = json.loads(captured.out)
    assert answer["bench"] == words[0] and answer["machine"]["cores"] >= 1
    return answer


def test_data(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(capsys, "data", "--batch", "4", "--context", "128", "--workers", "0,1", "--batches", "20")["rows"]
    assert [row["workers"] for row in rows] == [0, 1]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(4 * 128 / row["ms_per_batch"] * 1e3)
        assert row["ms_worst"] >= row["ms_per_batch"] > 0


@pytest.mark.slow
def test_comm(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(capsys, "comm", "--sizes", "64K,1M")["rows"]
    kinds = ["all-reduce", "all-gather", "reduce-scatter"]
    if rows[0]["device"] == "cpu":
        assert [(row["collective"], row["size"]) for row in rows] == [(k, s) for s in (65536, 1 << 20) for k in kinds]
    for row in rows:
        ranks = row["ranks"]
        share = (2 if row["collective"] == "all-reduce" else 1) * (ranks - 1) / ranks
        assert row["algorithm_gb_s"] == pytest.approx(row["size"] / row["seconds"] / 1e9)
        assert row["bus_gb_s"] == pytest.approx(row["algorithm_gb_s"] * share)


@pytest.mark.slow
def test_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--preset", "debug", "--steps", "8", "--nproc", "1", "--set", "training.context_length=64"]
    [row] = bench(capsys, "throughput", *words)["rows"]
    assert row["steps"] == 6, "the first quarter warms up"
    assert row["tokens_per_s"] > 0 and 0 < row["final_loss"] < 20


@pytest.mark.slow
def test_steps_that_only_a_set_names_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--preset",
        "debug",
        "--set",
        "training.max_steps=8",
        "--nproc",
        "1",
        "--set",
        "training.context_length=64",
    ]
    [row] = bench(capsys, "throughput", *words)["rows"]
    assert row["steps"] == 6, "8 and not the 20 that nobody typed"


@pytest.mark.slow
def test_folders_are_named_from_where_the_user_is_and_nothing_is_left_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 4096, "max_position_embeddings": 128, **shape})
    )
    monkeypatch.chdir(tmp_path)
    words = ["--preset", "debug", "--steps", "4", "--nproc", "1", "--set", "training.context_length=64"]
    [row] = bench(capsys, "throughput", *words, "--set", "model.model_path=mine")["rows"]
    assert row["steps"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
def test_startup(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(capsys, "startup", "--ways", "warm", "--nproc", "1")["rows"]
    assert [(row["way"], row["ranks"], len(row["rounds"])) for row in rows] == [("warm", 1, 1)]
    assert rows[0]["median_s"] == rows[0]["rounds"][0] > 0


def test_the_first_quarter_is_not_counted() -> None:
    records = [StepMetrics(tokens_per_s=1.0 if i < 2 else 100.0, step_s=0.5, loss=8.0 - i) for i in range(8)]
    result = summarised(records)
    assert (result.steps, result.tokens_per_s, result.mfu, result.final_loss) == (6, 100.0, None, 1.0)


def test_sizes() -> None:
    assert _sizes("64K, 1M,2GiB,512") == [65536, 1 << 20, 2 << 30, 512]


@given(st.lists(st.tuples(st.integers(1, 999_999), st.sampled_from(["", "K", "m", "G"])), min_size=1, max_size=5))
def test_every_size_is_read_as_written(sizes: list[tuple[int, str]]) -> None:
    factors = {"": 1, "K": 1 << 10, "m": 1 << 20, "G": 1 << 30}
    text = " , ".join(f"{number}{unit}" for number, unit in sizes)
    assert _sizes(text) == [number * factors[unit] for number, unit in sizes]


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert all(size > 0 for size in _sizes(text))
    except UsageError as error:
        assert error.exit_code == 2 and "cannot be read at" in error.message


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (
            ["startup", "--ways", "lukewarm"],
            "--ways lukewarm cannot be read; use one or more of warm",
        ),
        (["comm", "--sizes", "1M,many"], "--sizes 1M,many cannot be read at 'many'"),
        (["data", "--workers", "two"], "--workers two cannot be read"),
        (["throughput", "--preset", "debgu"], "debgu"),
        (
            ["throughput", "--preset", "debug", "--set", "training.max_steps=3"],
            "training.max_steps=3 (from --set) leaves too little to measure; set it to 4 or more",
        ),
        (
            ["throughput", "--preset", "debug", "--set", "training.max_steps=few"],
            'training.max_steps="few" (from --set) must be a whole number',
        ),
    ],
)
def test_mistakes(words: list[str], fragment: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *words])
    assert stopped.value.code == 2
    assert fragment in capsys.readouterr().err
