"""A user's mistake is one message with the value and the remedy, a non-zero exit code, and no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from model_check.cli.main import main, with_dashes

MISTAKES = [
    (["trian"], "did you mean train?"),
    (["train", "--preset", "debgu"], "debgu"),
    (["train", "--debug", "--preset", "full"], "keep one of them"),
    (["train", "--config", "nowhere.json"], "nowhere.json"),
    (["train", "--set", "training.lr=1e-4"], "training.learning_rate"),
    (["train", "--set", "trainig.max_steps=3"], "training"),
    (["train", "--set", "training.max_steps"], "section.key=value"),
    (["train", "--set", "training.max_steps=ten"], "ten"),
    (["train", "--set", "training.max_steps=-5"], "-5"),
    (["train", "--set", "training.learning_rate=0"], "learning_rate"),
    (["train", "--set", "training.precision=int4"], "int4"),
    (["train", "--set", "training.scheduler.type=cosin"], "cosin"),
    (["train", "--debug", "--set", "model.num_heads=3"], "must be divisible by model.num_heads"),
    (["train", "--debug", "--set", "model.num_kv_heads=3"], "num_kv_heads"),
    (["train", "--set", "model.model_path=llama-9-8b"], "llama-9-8b"),
    (["train", "--debug", "--nproc", "0"], "--nproc 0"),
    (["train", "--debug", "--nproc", "3", "--set", "training.global_batch=8"], "global_batch=8"),
    (["train", "--debug", "--gpus", "7"], "--gpus 7"),
    (["train", "--debug", "--set", "system.device=cuda"], "no GPU"),
    (["train", "--debug", "--set", "parallel.tensor=4"], "model.num_kv_heads=2 cannot be cut"),
    (["train", "--debug", "--set", "data.dataset=nowhere.jsonl"], "nowhere.jsonl"),
    (["train", "--debug", "--set", "data.tokenizer=nowhere/tokenizer.json"], "tokenizer"),
    (["prepare", "--config", "broken.json"], "broken.json"),
    (["explain", "MC999"], "MC999"),
    (["diagnose", "nowhere"], "nowhere"),
    (["run", "nowhere.py"], "nowhere.py"),
    (["run", "--guard", "stop", "train.py"], "observe, halt or off"),
]


@pytest.mark.parametrize(("arguments", "fragment"), MISTAKES, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_mistakes_are_answered_in_one_message(
    arguments: list[str],
    fragment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "GPU_RANK", "NUM_GPUS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "broken.json").write_text('{"training": {"max_steps": 10,,}}')
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code not in (0, None)
    err = capsys.readouterr().err
    assert fragment in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 3
    assert not (tmp_path / ".outputs").exists() or not any((tmp_path / ".outputs").rglob("metrics.jsonl"))


def test_all_faults_of_a_file_come_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    faults = {"training": {"max_steps": 0, "lr": 1, "precision": "fp4"}, "model": {"num_layers": "two"}}
    (tmp_path / "run.json").write_text(json.dumps(faults))
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--config", "run.json"])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("model-check: error: 4 problems in run.json")
    for key in ("training.max_steps", "training.lr", "training.precision", "model.num_layers"):
        assert key in err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--max_steps", "5"], ["--max-steps", "5"]),
        (["--fast_dev_run=3"], ["--fast-dev-run=3"]),
        (["--set", "training.max_steps=5"], ["--set", "training.max_steps=5"]),
        (["--config", "my_file.json"], ["--config", "my_file.json"]),
    ],
)
def test_underscores_of_the_guides_work_in_flags_only(given: list[str], expected: list[str]) -> None:
    assert with_dashes(given) == expected


def test_several_hosts_need_a_place_to_meet(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--debug", "--nnodes", "2"])
    assert stopped.value.code == 2
    assert "--nnodes 2 needs a place to meet" in capsys.readouterr().err
