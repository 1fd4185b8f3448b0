"""What a failed job saves of its model: one whole replica, or nothing if each rank holds only a part."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch

from model_check.record import read_jsonl
from tests.conftest import BIN, TINY, Shell


def lose_rank(shell: Shell, rank: int, *sets: str) -> None:
    """Trains on 3 ranks and kills one of them after a few steps."""
    values = (*TINY, "system.device=cpu", "checkpoint.interval=0", *sets)
    words = [word for value in values for word in ("--set", value)]
    command = [str(BIN / "model-check"), "train", "--preset", "debug", "--run-dir", "run", "--nproc", "3", *words]
    said = shell.folder / "said"
    with said.open("wb") as out:
        job = subprocess.Popen(
            [*command, "--max-steps", "100000"], cwd=shell.folder, env=shell.environment(), stdout=out, stderr=out
        )
        try:
            end = time.monotonic() + 90
            while "] Step [3/" not in said.read_text():
                assert time.monotonic() < end and job.poll() is None, said.read_text()
                time.sleep(0.02)
            events = read_jsonl(shell.folder / "run" / "events" / "supervisor.jsonl").records
            os.kill(
                next(e["pid"] for e in events if e["event"] == "rank_started" and e["rank"] == rank), signal.SIGKILL
            )
            assert job.wait(timeout=60) == 137, said.read_text()
        finally:
            job.kill()
            job.wait()


def left_in(shell: Shell) -> list[Path]:
    return sorted((shell.folder / ".checkpoints" / "run").glob("error_step*"))


@pytest.mark.slow
def test_a_failed_job_leaves_one_replica_and_clears_what_an_earlier_one_left_half_written(shell: Shell) -> None:
    folder = shell.folder / ".checkpoints" / "run"
    folder.mkdir(parents=True)
    beside = folder.parent / "an-earlier-run"
    beside.mkdir()
    host = socket.gethostname()
    gone = subprocess.Popen(["true"])
    gone.wait()
    reused = f"{host}.{os.getpid()}-1"  # this process has the PID, but started later
    (folder / "error_step.claim").write_text(reused)
    for whose in (f"{host}.{gone.pid}-1", reused, "another-host.1-1"):
        for place in (folder, beside):
            (place / f"error_step_7_rank_1@{whose}.tmp").write_text("half")
    (folder / "error_step_7_rank_2.tmp").write_text("half")
    lose_rank(shell, 2)
    assert [path.name for path in beside.iterdir()] == ["error_step_7_rank_1@another-host.1-1.tmp"]
    checkpoints = [path for path in left_in(shell) if path.name != "error_step.claim"]
    assert len(checkpoints) == 1 and checkpoints[0].suffix == ".pt", checkpoints
    saved = torch.load(checkpoints[0])
    assert saved["step"] >= 3 and all(tensor.isfinite().all() for tensor in saved["model"].values())


@pytest.mark.slow
def test_a_shard_is_not_saved_by_itself(shell: Shell) -> None:
    lose_rank(shell, 2, "parallel.strategy=fsdp")
    assert left_in(shell) == []
