"""Trouble with our own files never reaches the job that is being watched."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_check.record import RunDir, Verdict
from model_check.supervise.supervisor import Supervisor
from tests.conftest import Shell

SCRIPT = """\
import pathlib, sys
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    verdict = pathlib.Path(sys.argv[1]) / "verdict.json"
    verdict.unlink(missing_ok=True)
    verdict.mkdir()  # from now on no verdict can be written
for _ in range(30):
    dist.barrier()
print("fine")
"""


@pytest.mark.slow
def test_a_verdict_that_cannot_be_written_is_said_and_the_job_goes_on(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(SCRIPT)
    done = shell.model_check("run", "--nproc", "2", "--run-dir", "run", "train.py", "run")
    assert done.code == 0, done.err
    assert done.out.count("fine") == 2
    assert "the run directory cannot be used" in done.err
    assert "Traceback" not in done.err


def test_the_last_verdict_that_cannot_be_written_is_said_and_returned(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.verdict.mkdir()
    said: list[str] = []
    supervisor = Supervisor(run_dir, lambda _, live: Verdict(), say=said.append, show=said.append)
    assert supervisor.finish("completed", (), 0).outcome == "completed"
    (line,) = said
    assert line.startswith("the run directory cannot be used") and line.endswith("the verdict is only shown")
    assert not list(run_dir.root.glob(".verdict*")), "nothing half-written is left"


GIVES_UP = """\
import time
import torch
import torch.distributed as dist

class Odd(torch.Tensor):
    @property
    def nbytes(self):
        raise RuntimeError("no size")

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(30):
    tensor = torch.ones(4)
    dist.all_reduce(tensor.as_subclass(Odd) if (rank, step) == (1, 5) else tensor)
    time.sleep(0.4)
print("fine")
time.sleep(5 if rank == 0 else 0)  # a last save, say
"""


@pytest.mark.slow
def test_a_rank_that_cannot_be_recorded_any_more_trains_on_in_peace(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(GIVES_UP)
    words = ["--nproc", "2", "--hang-kill-after-s", "6", "--run-dir", "run", "train.py"]
    done = shell.model_check("run", *words)
    assert done.code == 0 and done.out.count("fine") == 2, done.out + done.err
    verdict = Verdict.read(shell.folder / "run" / "verdict.json")
    assert verdict is not None and (verdict.outcome, verdict.findings) == ("completed", [])
    assert any("recording rank 1 failed (RuntimeError" in note for note in verdict.notes)
    assert "[MC2" not in done.err
