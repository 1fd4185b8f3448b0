"""A run that was killed and resumed is the run that was not: every loss is the same to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BIN, TINY, Shell

STEPS = 40
SETTINGS = (
    "training.learning_rate=1e-3",
    "training.scheduler.type=cosine",
    "training.scheduler.warmup_steps=5",
    "checkpoint.interval=6",
)


def words(settings: tuple[str, ...]) -> list[str]:
    return [word for value in settings for word in ("--set", value)]


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


class Live:
    """A job in the background, in a run directory that the next one continues."""

    def __init__(self, shell: Shell, ranks: int, *settings: str, resume: bool = False) -> None:
        self.run_dir = shell.folder / "live"
        self._before = len(records(self.run_dir)) if resume else 0
        more = ["--resume", "auto"] if resume else []
        self.process = subprocess.Popen(
            [
                *(BIN / "model-check", "train", "--debug", "--run-dir", self.run_dir, "--nproc", str(ranks)),
                *("--max-steps", str(STEPS), *words((*TINY, *SETTINGS, *settings)), *more),
            ],
            cwd=shell.folder,
            env=shell.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for_records(self, count: int, deadline_s: float = 120) -> None:
        end = time.monotonic() + deadline_s
        metrics = self.run_dir / "metrics.jsonl"
        while time.monotonic() < end and self.process.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") >= self._before + count:
                return
            time.sleep(0.01)
        raise AssertionError(f"{count} steps were not reached: {self.finish()}")

    def rank_pids(self) -> dict[int, int]:
        lines = (self.run_dir / "events" / "supervisor.jsonl").read_text().splitlines()
        started = [json.loads(line) for line in lines if '"rank_started"' in line]
        return {record["rank"]: record["pid"] for record in started}

    def finish(self, deadline_s: float = 120) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=deadline_s)
        return self.process.returncode, out


def undisturbed(shell: Shell, ranks: int, *settings: str) -> dict[int, float]:
    done = shell.train(
        "--nproc", str(ranks), "--max-steps", str(STEPS), *words((*SETTINGS, *settings, "checkpoint.dir=elsewhere"))
    )
    assert done.code == 0, done.err
    return {record["step"]: record["loss"] for record in done.metrics()}


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        pytest.param(2, (), marks=pytest.mark.slow),
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(4, (), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.strategy=fsdp",), marks=pytest.mark.slow),
        pytest.param(2, ("checkpoint.async_save=false", "training.grad_accum_nums=2"), marks=pytest.mark.slow),
    ],
    ids=["ddp2", "single", "ddp4", "fsdp2", "ddp2-sync-accumulate"],
)
def test_killed_twice_and_resumed_gives_the_same_losses_to_the_bit(
    shell: Shell, ranks: int, settings: tuple[str, ...]
) -> None:
    expected = undisturbed(shell, ranks, *settings)
    assert expected[STEPS - 1] < expected[0] - 1, "a run that learns nothing would compare equal too"
    for kill_after, resumes in ((15, False), (9, True)):
        job = Live(shell, ranks, *settings, resume=resumes)
        job.wait_for_records(kill_after)
        os.kill(job.rank_pids()[ranks - 1], signal.SIGKILL)
        code, out = job.finish()
        assert code == 128 + signal.SIGKILL, out
    code, out = Live(shell, ranks, *settings, resume=True).finish()
    assert code == 0, out
    assert "resume: continuing after step" in out
    found = records(shell.folder / "live")
    assert {record["step"] for record in found} == set(range(STEPS))
    wrong = {r["step"]: (r["loss"], expected[r["step"]]) for r in found if r["loss"] != expected[r["step"]]}
    assert wrong == {}


@pytest.mark.slow
def test_usr1_saves_and_exits_with_75_and_the_next_run_goes_on(shell: Shell) -> None:
    job = Live(shell, 2)
    job.wait_for_records(8)
    job.process.send_signal(signal.SIGUSR1)
    code, out = job.finish()
    assert code == 75, out
    assert "stopped by request, state saved" in out
    last = records(job.run_dir)[-1]["step"]
    assert (shell.folder / ".checkpoints" / "latest").resolve().name == f"step_{last:08d}"
    resumed = Live(shell, 2, resume=True)
    code, out = resumed.finish()
    assert code == 0, out
    assert f"continuing after step {last} from" in out
    assert [r["step"] for r in records(job.run_dir)] == list(range(STEPS))
    assert [r["step"] for r in records(job.run_dir) if "save_pause_s" in r][-1] == STEPS - 1


@pytest.mark.slow
def test_another_number_of_ranks_continues_the_same_data(shell: Shell) -> None:
    """4 → 2 → 1 → 4 ranks at one global batch: no sample is repeated or skipped, so the losses are those of 4 ranks."""
    batch = ("training.global_batch=8", "training.batch_size=2", "training.grad_accum_nums=null")
    # The cosine depends on the length of the run, and these four end at different steps.
    batch += ("training.scheduler.type=linear_warmup",)
    expected = undisturbed(shell, 4, *batch)
    seen: list[dict[str, Any]] = []
    for ranks, until in ((4, 12), (2, 20), (1, 28), (4, STEPS)):
        done = shell.train(
            "--nproc",
            str(ranks),
            "--max-steps",
            str(until),
            *words((*SETTINGS, *batch)),
            *(["--resume", "auto"] if seen else []),
        )
        assert done.code == 0, done.err
        if seen:
            assert "[MC606] saved on" in done.out
        seen += done.metrics()
    assert [record["step"] for record in seen] == list(range(STEPS))
    assert [record["tokens"] for record in seen] == [8 * 64 * (step + 1) for step in range(STEPS)]
    # The same terms in another order: far less than what one other sample changes (see test_same_losses).
    assert [r["loss"] for r in seen] == pytest.approx(list(expected.values()), rel=2e-5)
