"""Trouble with our own files never reaches the job that is being watched."""

from __future__ import annotations

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


def test_a_verdict_that_cannot_be_written_is_said_and_the_job_goes_on(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(SCRIPT)
    done = shell.model_check("run", "--nproc", "2", "--run-dir", "run", "train.py", "run")
    assert done.code == 0, done.err
    assert done.out.count("fine") == 2
    assert "the run directory cannot be used" in done.err
    assert "Traceback" not in done.err
