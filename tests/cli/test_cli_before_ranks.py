"""What ends a run before its ranks start: it is in the verdict, and nothing secret is in the run directory."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from model_check.cli.fitting import check_host_memory
from model_check.config import load_config
from model_check.errors import UsageError
from tests.conftest import Shell


def test_a_data_fault_is_in_the_verdict(shell: Shell) -> None:
    (shell.folder / "empty.txt").write_text("")
    done = shell.train("--nproc", "1", "--set", "data.dataset=empty.txt")
    assert done.code == 1 and "MC904" in done.err and "Traceback" not in done.err
    verdict = done.verdict()
    assert (verdict["outcome"], verdict["exit_code"]) == ("failed", 1)
    assert verdict["findings"][0]["code"] == "MC904"


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


# Far beyond any host: 3.1 T parameters.
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
