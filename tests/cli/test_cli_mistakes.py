"""A user's mistake is one message with the value and the remedy, a non-zero exit code, and no traceback."""

from __future__ import annotations

import json
import shlex
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
    (
        ["train", "--debug", "--nproc", "2", "--set", "parallel.tensor=2", "--set", "data.tokenizer=bytes"],
        "vocabulary of 257 (data.tokenizer=bytes) cannot be cut over parallel.tensor=2 ranks; set model.vocab_size=258",
    ),
    (["train", "--debug", "--set", "data.dataset=nowhere.jsonl"], "nowhere.jsonl"),
    (["train", "--debug", "--set", "data.tokenizer=nowhere/tokenizer.json"], "tokenizer"),
    (["prepare", "--config", "broken.json"], "broken.json"),
    (["explain", "MC999"], "MC999"),
    (["train", "--debug", "--resume", "nowhere"], "there is no checkpoint nowhere; name a step_* folder"),
    (
        ["train", "--debug", "--resume", "/proc/self"],
        "/proc/self holds no checkpoint and no weights; name",
    ),
    (["diagnose", "nowhere"], "nowhere"),
    (["run", "nowhere.py"], "nowhere.py"),
    (["run", "-m", "nowhere.train"], "there is no module nowhere.train"),
    (["run", "--guard", "stop", "train.py"], "observe, full, halt or off"),
    (["run", "--memory-limit-gb", "inf", "train.py"], "--memory-limit-gb inf is no limit; leave the flag out"),
    (["train", "--nrpoc", "2"], "train has no flag --nrpoc; did you mean --nproc?"),
    (["train", "--nproc", "two"], "--nproc two is not a whole number; give --nproc a whole number"),
    (["train", "--nproc"], "--nproc needs a value; write --nproc VALUE"),
    (["train", "max-steps"], "train takes no word 'max-steps'; did you mean --max-steps?"),
    (["prepare", "--verify=3"], "--verify takes no value; write --verify alone"),
    (["gpus", "--xyz"], "gpus has no flag --xyz; model-check gpus --help lists its flags"),
    (["attach", "abc"], "PIDS abc is not a whole number"),
    (["diagnose"], "diagnose needs RUN_DIR; write model-check diagnose RUN_DIR"),
    (["explain", "--jsno"], "explain has no flag --jsno; did you mean --json?"),
    (["checkpoint"], "checkpoint needs a verb; use one of inspect, verify, convert"),
    (["checkpoint", "inspcet", "x"], "checkpoint has no verb 'inspcet'; did you mean inspect?"),
    (["checkpoint", "convert", "a"], "checkpoint convert needs TARGET; write model-check checkpoint convert SOURCE"),
    (["run"], "run needs a script"),
    (["run", "--nrpoc", "2", "train.py"], "run has no flag --nrpoc; did you mean --nproc?"),
    (["run", "--run_dir", "d", "nowhere.py"], "there is no script nowhere.py"),
    (["run", "--hang-kill-after-s", "-5", "x.py"], "--hang-kill-after-s -5"),
    (["run", "torchrun", "--nproc-per-node", "2", "x.py"], "write -- in front of it: model-check run -- torchrun …"),
    (["run", "env", "python", "x.py"], "env is a command, not a Python script"),
]
PARSERS_OWN = MISTAKES[-18:]


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
    assert err.startswith("model-check: error: ")
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 3
    assert not (tmp_path / ".outputs").exists() or not any((tmp_path / ".outputs").rglob("metrics.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "both"),
    [
        ("train --max-steps 5 --set training.max_steps=7", "--max-steps 5 and --set training.max_steps=7"),
        ("train --set training.batch_size=8 --batch-size=4", "--batch-size 4 and --set training.batch_size=8"),
        ("train --num-workers 1 --set training.num_workers=two", "--num-workers 1 and --set training.num_workers=two"),
        ("train --profile --set training.profile=false", "--profile and --set training.profile=false"),
        ("train --fast-dev-run 2 --set training.max_steps=3", "--fast-dev-run 2 and --set training.max_steps=3"),
        ("train --max-steps 5 --set 'training={max_steps: 7}'", "--max-steps 5 and --set training.max_steps=7"),
        (
            "plan --gpu H100 --batch-size 4 --set training.batch_size=4 --set training.batch_size=2",
            "--batch-size 4 and --set training.batch_size=2",
        ),
        (
            "bench throughput --preset debug --steps 9 --set training.max_steps=8",
            "--steps 9 and --set training.max_steps=8",
        ),
    ],
)
def test_a_flag_and_a_set_that_say_two_things_are_refused(
    arguments: str, both: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*shlex.split(arguments), *(["--debug", "--dry-run"] if arguments.startswith("train") else [])])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.err == f"model-check: error: {both} set one key to two different values; leave one of them out\n"
    assert said.out == ""


@pytest.mark.parametrize(
    "arguments", ["--max-steps 5 --fast-dev-run 2", "--fast_dev_run=2 --max_steps=5 --set training.max_steps=5"]
)
def test_two_flags_that_say_two_things_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--debug", "--dry-run", *arguments.split()])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    sentence = (
        "--max-steps 5 and --fast-dev-run 2 set training.max_steps to two different values; leave one of them out"
    )
    assert (said.out, said.err) == ("", f"model-check: error: {sentence}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        "--max-steps 5 --set training.max_steps=5 --batch-size 2 --profile --set training.profile=true",
        # What --fast-dev-run only implies may be wanted after all.
        "--fast-dev-run 5 --set training.max_steps=5 --set checkpoint.interval=2",
        "--max-steps 5 --set training.max_steps=7 --set training.max_steps=5",
        "--max-steps 5 --fast-dev-run 5",
    ],
)
def test_two_that_say_the_same_are_fine(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--debug", "--nproc", "1", "--dry-run", *arguments.split()])
    assert ended.value.code in (0, None)
    values = json.loads(capsys.readouterr().out)["values"]
    assert values["training"]["max_steps"] == 5
    assert values["checkpoint"]["interval"] == (2 if "checkpoint" in arguments else 0)


@pytest.mark.parametrize("arguments", [words for words, _ in PARSERS_OWN], ids=" ".join)
def test_a_wrong_word_on_the_command_line_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1 and said.out == ""
    assert "; " in said.err, "there is no remedy"


def test_the_help_of_run_shows_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["run", "--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert "Usage: model-check run [FLAGS] SCRIPT ARGS… | [FLAGS] -- COMMAND…" in shown
    assert "model-check run --nproc 2 train.py --its --own args" in shown
    assert "model-check run -- torchrun --nproc-per-node 2 train.py" in shown


def test_a_used_run_directory_of_run_has_no_resume_to_offer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it must not start')\n")
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--run-dir", str(tmp_path), str(script)])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(f"--run-dir {tmp_path} already holds a run; name a new directory\n")


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
