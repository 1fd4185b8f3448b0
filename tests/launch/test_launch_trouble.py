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
