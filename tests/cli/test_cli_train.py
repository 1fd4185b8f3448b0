"""`model-check train` as a user runs it: two CPU ranks, from the command to the verdict."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from model_check.record.ring import read_ring
from tests.conftest import BIN, TINY, Shell

METRICS = {
    "step",
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "mfu",
    "step_s",
    "data_wait_s",
    "memory_gib",
    "tokens",
    "skipped",
}
LINE = re.compile(
    r"^\[CPU(\d)\] Step \[(\d+)/4\] \| Loss: \d+\.\d{4} \| LR: 1\.00e-07 \| Grad Norm: \d+\.\d{4} \| ETA: \d+:\d\d$",
    re.M,
)


def test_two_cpu_ranks_train_and_leave_a_whole_run_directory(shell: Shell) -> None:
    done = shell.train("--max_steps", "4", "--set", "logging.tensorboard=true", HF_TOKEN="hf_secret_of_the_test")
    assert done.code == 0, done.err
    assert sorted(LINE.findall(done.out)) == [(str(rank), str(step)) for rank in (0, 1) for step in range(4)]
    assert re.search(r"^done: 4 steps, final loss \d+\.\d{4} \(floor 1\.\d{4}\), [\d,]+ tokens/s, peak", done.out, re.M)

    records = done.metrics()
    assert [set(r) for r in records] == [METRICS] * 4
    assert [r["step"] for r in records] == [0, 1, 2, 3]
    assert records[-1]["tokens"] == 4 * 2 * 2 * 64
    assert records[0]["mfu"] is None
    assert 8.0 < records[0]["loss"] < 8.6, "ln(4096) is 8.3"

    verdict = done.verdict()
    assert (verdict["outcome"], verdict["exit_code"], verdict["world_size"]) == ("completed", 0, 2)
    assert verdict["steps_completed"] == 4
    assert [f for f in verdict["findings"] if f["severity"] == "error"] == []

    config = json.loads((done.run_dir / "config.json").read_text())
    assert config["values"]["training"]["max_steps"] == 4
    assert config["origins"]["training.max_steps"] == "flag --max-steps"
    assert config["origins"]["training.learning_rate"] == "preset debug"
    assert config["origins"]["training.context_length"] == "--set"

    everything = "".join(p.read_text(errors="replace") for p in done.run_dir.rglob("*") if p.is_file())
    assert "hf_secret_of_the_test" not in everything + done.out + done.err
    assert (done.run_dir / "logs" / "rank-00001.log").read_text().count("Step [") == 4
    assert list((done.run_dir / "tensorboard").glob("events.out.tfevents.*"))
    for rank in (0, 1):
        ring = read_ring(done.run_dir / "blackbox" / f"rank-{rank:05d}.ring")
        begun = Counter(crumb.phase for crumb in ring.crumbs if crumb.event == "begin" and crumb.step > 0)
        assert (begun["data"], begun["forward"], begun["backward"], begun["optimizer"]) == (3, 3, 3, 3)


@pytest.mark.slow
def test_what_every_optimizer_asks_for_is_imported_once_not_by_each_rank(shell: Shell) -> None:
    done = shell.train("--nproc", "1", "--max-steps", "1", PYTHONPROFILEIMPORTTIME="1")
    assert done.code == 0, done.err
    assert re.search(r"^done: 1 step, ", done.out, re.M)
    dynamo = re.compile(r"^import time: .*\| +torch\._dynamo\b", re.M)
    assert dynamo.search(done.err), "the launcher imports it before it forks"
    assert not dynamo.search((done.run_dir / "logs" / "rank-00000.log").read_text())


@pytest.mark.slow
def test_evaluation_is_in_the_metrics_of_its_step(shell: Shell) -> None:
    done = shell.train(
        "--nproc", "1", "--max-steps", "4", "--set", "training.eval_interval=2", "--set", "data.samples=2000"
    )
    assert done.code == 0, done.err
    with_eval = {r["step"]: r["val_loss"] for r in done.metrics() if "val_loss" in r}
    assert list(with_eval) == [1, 3]
    assert all(8.0 < value < 8.6 for value in with_eval.values())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions_follow_fp32_on_the_cpu(shell: Shell, precision: str) -> None:
    common = ("--nproc", "1", "--max-steps", "4", "--set", "training.learning_rate=1e-3")
    lower = shell.train(*common, "--set", f"training.precision={precision}", "--set", "training.use_amp=true")
    full = shell.train(*common, "--set", "training.precision=fp32")
    assert lower.code == full.code == 0, lower.err + full.err
    # bf16 products carry 8 bits: the mean over hundreds of tokens agrees to about a thousandth.
    assert lower.losses() == pytest.approx(full.losses(), rel=2e-3)
    assert lower.losses() != full.losses()
    assert not any(r["skipped"] for r in lower.metrics())


def test_dry_run_prints_the_configuration_and_starts_nothing(shell: Shell) -> None:
    done = shell.model_check("train", "--debug", "--dry-run", "--batch_size", "3")
    assert done.code == 0
    printed = json.loads(done.out)
    assert printed["values"]["training"]["batch_size"] == 3
    assert not (shell.folder / ".outputs").exists()


def test_a_used_run_directory_is_refused_and_kept(shell: Shell) -> None:
    used = shell.folder / "used"
    used.mkdir()
    (used / "precious").write_text("keep me")
    done = shell.model_check("train", "--debug", "--run-dir", str(used))
    assert done.code == 2
    assert "already holds a run; name a new directory, or add --resume auto to continue into it" in done.err
    assert "Traceback" not in done.err
    assert (used / "precious").read_text() == "keep me"


class Running:
    """A training job in the background."""

    def __init__(self, shell: Shell, *arguments: str) -> None:
        self.run_dir = shell.folder / "live"
        sets = [word for value in TINY for word in ("--set", value)]
        self.process = subprocess.Popen(
            [BIN / "model-check", "train", "--debug", "--run-dir", self.run_dir, *sets, *arguments],
            cwd=shell.folder,
            env=shell.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_step(self, step: int, deadline_s: float = 120) -> None:
        end = time.monotonic() + deadline_s
        metrics = self.run_dir / "metrics.jsonl"
        while time.monotonic() < end and self.process.poll() is None:
            if metrics.exists() and len(metrics.read_text().splitlines()) > step:
                return
            time.sleep(0.05)
        raise AssertionError(f"step {step} was not reached: {self.process.poll()}")

    def rank_pids(self) -> dict[int, int]:
        lines = (self.run_dir / "events" / "supervisor.jsonl").read_text().splitlines()
        started = [json.loads(line) for line in lines if '"rank_started"' in line]
        return {record["rank"]: record["pid"] for record in started}

    def finish(self, deadline_s: float = 60) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=deadline_s)
        return self.process.returncode, out, err

    def verdict(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "verdict.json").read_text())  # type: ignore[no-any-return]


def gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_killed_rank_ends_the_job_and_is_named(shell: Shell) -> None:
    job = Running(shell, "--max-steps", "100000")
    job.wait_for_step(2)
    pids = job.rank_pids()
    os.kill(pids[1], signal.SIGKILL)
    killed_at = time.monotonic()
    code, out, err = job.finish()
    assert time.monotonic() - killed_at < 10  # the interpreter of the launcher and the verdict included
    assert code == 128 + signal.SIGKILL
    assert all(gone(pid) for pid in pids.values())
    verdict = job.verdict()
    assert (verdict["outcome"], verdict["exit_code"]) == ("failed", 137)
    first = verdict["findings"][0]
    assert first["code"] == "MC303" and first["ranks"] == [1] and 1 not in first["victims"]
    assert "rank 1" in out + err and "Traceback (most recent call last)" not in err


@pytest.mark.slow
def test_sigterm_saves_and_resume_continues_the_losses(shell: Shell) -> None:
    reference = shell.train("--nproc", "2", "--max-steps", "12", "--set", "checkpoint.interval=5")
    assert reference.code == 0, reference.err
    (shell.folder / ".checkpoints").rename(shell.folder / "elsewhere")
    job = Running(shell, "--nproc", "2", "--max-steps", "100000", "--set", "checkpoint.interval=4")
    job.wait_for_step(5)
    job.process.send_signal(signal.SIGTERM)
    code, out, err = job.finish()
    assert code == 75, err
    assert "SIGTERM: the ranks have 600 s to save and stop" in out + err, "a large model takes minutes to write"
    assert job.verdict()["outcome"] == "interrupted"
    stopped_after = json.loads(job.run_dir.joinpath("metrics.jsonl").read_text().splitlines()[-1])["step"]
    more = str(stopped_after + 4)
    resumed = shell.train("--nproc", "2", "--max-steps", more, "--resume", "auto")
    assert resumed.code == 0, resumed.err
    assert [r["step"] for r in resumed.metrics()] == list(range(stopped_after + 1, stopped_after + 4))
    assert f"continuing after step {stopped_after}" in resumed.out
    assert resumed.verdict()["steps_completed"] == stopped_after + 4, "counted as the metrics do"
    known = dict(enumerate(reference.losses()))
    for record in resumed.metrics():
        if record["step"] in known:
            assert record["loss"] == pytest.approx(known[record["step"]], rel=1e-5)


def test_sigint_without_checkpoints_is_an_interruption(shell: Shell) -> None:
    job = Running(shell, "--max-steps", "100000")
    job.wait_for_step(1)
    pids = job.rank_pids()
    job.process.send_signal(signal.SIGINT)
    code, out, err = job.finish()
    assert code == 130
    assert "SIGINT: the ranks have 10 s to save and stop; Ctrl-C again ends them now" in out + err
    assert all(gone(pid) for pid in pids.values())
    assert job.verdict()["outcome"] == "interrupted"
