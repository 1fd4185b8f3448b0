"""What `model-check run` prints at the end of a job, for users who read nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.signals import hear_signals

SCRIPTS = Path(__file__).resolve().parents[1] / "faults" / "scripts"


def run(folder: Path, script: Path, *flags: str, nproc: int = 2) -> subprocess.CompletedProcess[str]:
    """Runs the script under the black box to its end."""
    command = [sys.executable, "-m", "model_check.cli.main", "run", "--nproc", str(nproc)]
    return subprocess.run(
        [*command, "--run-dir", str(folder / "run"), *flags, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_a_run_whose_losses_are_nan_to_the_end_did_not_train(tmp_path):
    ended = run(tmp_path, SCRIPTS / "nan_to_the_end.py")
    assert ended.returncode == 0, ended.stderr
    last = next(line for line in ended.stderr.splitlines() if line.startswith("completed, exit code 0"))
    assert "did not train from step 12 on (MC408)" in last and "--guard halt" in last


DEEP = """
import torch
import torch.distributed as dist
from torch import nn

class Bad(nn.Module):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 5 and dist.get_rank() == 1:
            raise ValueError("bad sample 17")
        return x

dist.init_process_group("gloo")
inner = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Bad()))
model = nn.parallel.DistributedDataParallel(nn.Sequential(inner))
for step in range(10):
    model(torch.randn(2, 4)).sum().backward()
"""


@pytest.mark.slow
def test_a_crash_prints_one_traceback_without_our_frames(tmp_path):
    script = tmp_path / "deep.py"
    script.write_text(DEEP)
    ended = run(tmp_path, script, nproc=3)
    assert ended.returncode == 1
    said = ended.stdout + ended.stderr
    assert said.count("Traceback (most recent call last)") == 1 and "[rank1]: ValueError: bad sample 17" in said
    assert "model_check/blackbox" not in said and "model_check/numerics" not in said
    # Each victim has one line, with the file that holds the rest.
    victims = [line for line in ended.stdout.splitlines() if "lost its peer" in line]
    for line in victims:
        log = Path(line.rpartition("(traceback: ")[2].rstrip(")"))
        assert "Traceback (most recent call last)" in log.read_text() and "model_check/blackbox" not in log.read_text()


def test_ranks_that_fail_alike_print_their_traceback_once(tmp_path):
    script = tmp_path / "alike.py"
    script.write_text("import json\njson.loads('{')\n")
    ended = run(tmp_path, script, nproc=3)
    said = ended.stdout + ended.stderr
    assert said.count("Traceback (most recent call last)") == 1
    assert ended.stdout.count("JSONDecodeError") >= 1


@pytest.mark.parametrize("form", [(), ("--", sys.executable)], ids=["script", "command"])
def test_a_rank_that_goes_on_after_ctrl_c_is_ended_after_the_stop_grace(tmp_path, form):
    (tmp_path / "stays.py").write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: print('heard', flush=True))\n"
        "open('up', 'w').close()\n"
        "time.sleep(100)\n"
    )
    os.mkfifo(tmp_path / "up")
    flags = ["--run-dir", "run", "--stop-grace", "0.5", *form, "stays.py"]
    job = subprocess.Popen(
        [sys.executable, "-m", "model_check.cli.main", "run", *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=hear_signals,
    )
    try:
        (tmp_path / "up").read_text()
        asked_at = time.monotonic()
        job.send_signal(signal.SIGINT)
        out, _ = job.communicate(timeout=30)
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGINT
    assert 0.5 <= time.monotonic() - asked_at < 8.0
    assert "heard" in out
