"""What ends a run before its ranks start: it is in the verdict, and nothing secret is in the run directory."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_check.cli.fitting import check_host_memory
from model_check.cli.train import _verdict_before_the_ranks
from model_check.config import load_config
from model_check.config.shapes import ModelShape
from model_check.errors import UsageError
from model_check.models import build_model
from model_check.record import RunDir, Verdict
from tests.conftest import BIN, ROOT, TINY, Shell
from tests.models.exported import export


def test_a_data_fault_is_in_the_verdict(shell: Shell) -> None:
    (shell.folder / "empty.txt").write_text("")
    done = shell.train("--nproc", "1", "--set", "data.dataset=empty.txt")
    assert done.code == 1 and "MC904" in done.err and "Traceback" not in done.err
    verdict = done.verdict()
    assert (verdict["outcome"], verdict["exit_code"]) == ("failed", 1)
    assert verdict["findings"][0]["code"] == "MC904"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_data_is_prepared_is_in_the_verdict(tmp_path: Path, number: signal.Signals) -> None:
    directory = RunDir.create(tmp_path / "run")
    with pytest.raises(SystemExit) as ended, _verdict_before_the_ranks(directory, 2):
        os.kill(os.getpid(), number)
        signal.pause()
    assert ended.value.code == 128 + number
    verdict = Verdict.read(directory.verdict)
    assert verdict is not None
    assert (verdict.outcome, verdict.exit_code, verdict.world_size) == ("interrupted", 128 + number, 2)


def test_a_password_in_a_url_stays_out_of_the_run_directory(shell: Shell) -> None:
    done = shell.train("--nproc", "1", "--set", "data.dataset=https://someone:hunter2secret@127.0.0.1:9/x.jsonl")
    assert done.code != 0
    config = json.loads((done.run_dir / "config.json").read_text())
    assert config["values"]["data"]["dataset"] == "https://[redacted]@127.0.0.1:9/x.jsonl"
    written = "".join(p.read_text(errors="replace") for p in done.run_dir.rglob("*") if p.is_file())
    assert "hunter2secret" not in written


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("training.precision=fp8", "training.precision=fp8 does not run on CPU ranks; use bf16"),
        pytest.param(
            "training.optimizer_states=8bit",
            "training.optimizer_states=8bit needs torchao, which is not installed; "
            "pip install torchao, or set training.optimizer_states to bf16",
            marks=pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed"),
        ),
    ],
)
def test_what_every_rank_would_stop_at_starts_none(shell: Shell, setting: str, words: str) -> None:
    done = shell.train("--nproc", "1", "--set", "system.device=cpu", "--set", setting)
    assert done.code == 2 and words in done.err and "Traceback" not in done.err
    assert not done.run_dir.exists(), "no run was begun"


# 3.1 T parameters: too large for any host.
HUGE = ("--preset", "32b", "--set", "model.num_layers=6400", "--set", "system.device=cpu")


def test_a_run_that_the_host_cannot_hold_is_refused(shell: Shell) -> None:
    done = shell.model_check("train", *HUGE, "--nproc", "2", "--run-dir", "big")
    assert done.code == 2 and "Traceback" not in done.err
    assert re.search(r"2 CPU ranks need [\d.]+ GiB of host memory, and this host has [\d.]+; .*--force", done.err)
    assert "MC503" in done.err
    assert not (shell.folder / "big").exists(), "no run was begun"
    assert shell.model_check("train", *HUGE, "--dry-run").code == 0, "a configuration may be looked at anywhere"


def test_force_starts_what_the_host_cannot_hold() -> None:
    config = load_config(preset="32b", overrides=["model.num_layers=6400"])
    said: list[str] = []
    check_host_memory(config, on_gpu=False, world_size=2, ranks_per_host=2, force=True, say=said.append)
    assert len(said) == 1 and "tried all the same (--force)" in said[0]


def test_what_gpus_offload_must_fit_into_the_host() -> None:
    config = load_config(preset="32b", overrides=["model.num_layers=6400"])
    limits = {"on_gpu": True, "world_size": 8, "ranks_per_host": 8, "force": False}
    check_host_memory(config, **limits, say=print)
    offloading = config.with_values({"fsdp.cpu_offload": True}, "--set")
    with pytest.raises(UsageError, match="8 GPU ranks need"):
        check_host_memory(offloading, **limits, say=print)


SHARD = "model-00002-of-00004.safetensors"
MATRIX = "model.layers.0.mlp.down_proj.weight"
PRETRAINED = [
    word
    for size in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size")
    for word in ("--set", f"model.{size}=null")
]
PRETRAINED += ["--set", "model.init=pretrained", "--set", "model.model_path=model"]


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "model"
    return export(build_model(ModelShape(2, 32, 4, 2, 8, 64, 4096)), folder, most=60_000)


def rewritten(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(shard: Path) -> None:
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard)

    return rewrite


def cut_in_half(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, f"model lacks {SHARD}; fetch the model again"),
    "cut off": (
        cut_in_half,
        rf"model/{SHARD} is not a whole safetensors file \([\d,]+ bytes; .*; fetch the model again",
    ),
    "no safetensors": (lambda shard: shard.write_bytes(b"x" * 1000), f"model/{SHARD} is not a whole safetensors file"),
    "a pointer": (
        lambda shard: shard.write_text("version https://git-lfs.github.com/spec/v1\nsize 1\n"),
        f"model/{SHARD} is a pointer of Git LFS, not the file itself; run git lfs pull",
    ),
    "of another shape": (
        rewritten(lambda tensors: tensors.update({MATRIX: torch.zeros(32, 65)})),
        rf"model/{SHARD} do not fit the model \(1 of another shape: {MATRIX} \[32, 65\] instead of \[32, 64\]\)",
    ),
    "of whole numbers": (
        rewritten(lambda tensors: tensors.update({MATRIX: torch.zeros(32, 64, dtype=torch.int8)})),
        rf"{SHARD} do not fit the model \(1 no floating-point numbers: {MATRIX} I8\); name the model that is not quant",
    ),
    "without a tensor": (
        rewritten(lambda tensors: tensors.pop(MATRIX)),
        rf"model/{SHARD} do not fit the model \(1 missing: {MATRIX}\); .*fetch the model again",
    ),
    "no index": (
        lambda shard: (shard.parent / "model.safetensors.index.json").write_text("{"),
        "model/model.safetensors.index.json cannot be used, it is not an index of safetensors; fetch the model again",
    ),
    "no config": (lambda shard: (shard.parent / "config.json").write_text("{"), "its config.json is not JSON"),
}


@pytest.mark.parametrize(
    "damage", [d if d in ("cut off", "no config") else pytest.param(d, marks=pytest.mark.slow) for d in DAMAGE]
)
def test_weights_that_cannot_be_used_start_no_rank(shell: Shell, whole_model: Path, damage: str) -> None:
    shutil.copytree(whole_model, shell.folder / "model")
    spoil, sentence = DAMAGE[damage]
    spoil(shell.folder / "model" / SHARD)
    done = shell.train("--nproc", "2", *PRETRAINED)
    assert done.code == 2, done.err
    assert re.search(sentence, done.err), done.err
    assert len(done.err.splitlines()) <= 2 and "MC827" in done.err and "Traceback" not in done.err
    assert not done.run_dir.exists(), "no run was begun"


@pytest.mark.slow
def test_weights_that_are_whole_are_trained(shell: Shell, whole_model: Path) -> None:
    shutil.copytree(whole_model, shell.folder / "model")
    done = shell.train("--nproc", "2", "--max-steps", "1", *PRETRAINED)
    assert done.code == 0, done.err


def test_a_damaged_folder_to_resume_from_starts_no_rank(shell: Shell, whole_model: Path) -> None:
    shutil.copytree(whole_model, shell.folder / "model")
    cut_in_half(shell.folder / "model" / SHARD)
    done = shell.train("--nproc", "2", "--resume", "model")
    assert done.code == 2 and f"model/{SHARD} is not a whole safetensors file" in done.err, done.err
    assert not done.run_dir.exists(), "no run was begun"


TOO_SMALL = {
    "a batch": (
        ("data.dataset=small.txt", "training.context_length=128"),
        r"small.txt gives 3 samples of 128 tokens, fewer than one global batch of 4 "
        r"\(2 ranks × batch 2 × accumulation 1\); use more text",
    ),
    "an evaluation": (
        ("data.samples=40", "training.batch_size=8", "data.validation_fraction=0.05", "training.eval_interval=1"),
        r"the \d held-out samples do not fill one batch of 16; raise data.validation_fraction",
    ),
    "its tokens": (("model.vocab_size=300",), "the model's vocabulary of 300 is smaller than the tokenizer's 4096"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", TOO_SMALL)
def test_what_is_too_small_starts_no_rank(shell: Shell, what: str) -> None:
    (shell.folder / "small.txt").write_text("".join(f"line {n} of a short file\n" for n in range(60)))
    settings, sentence = TOO_SMALL[what]
    done = shell.train("--nproc", "2", *(word for value in settings for word in ("--set", value)))
    assert done.code == 2 and re.search(sentence, done.err), done.err
    assert "Traceback" not in done.err and not list(done.run_dir.glob("blackbox/*.ring")), "no rank was started"
    verdict = done.verdict()
    assert (verdict["outcome"], verdict["exit_code"]) == ("failed", 2)


@pytest.mark.slow
def test_torchruns_ranks_say_the_same_sentence(shell: Shell, whole_model: Path) -> None:
    shutil.copytree(whole_model, shell.folder / "model")
    (shell.folder / "model" / SHARD).unlink()
    done = shell.run(
        *(str(BIN / "torchrun"), "--nproc_per_node=2", "--standalone", str(ROOT / "pretrain_main.py"), "--debug"),
        *("--run-dir", "run", *(word for value in TINY for word in ("--set", value)), *PRETRAINED),
    )
    assert done.code != 0 and f"[MC827] model lacks {SHARD}; fetch the model again" in done.err, done.err
    assert "ModelError" not in done.err and "exitcode  : 2" in done.err
