"""`model-check run` keeps a script's exit code, breaks no loop of it, and holds on to none of its groups."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT

RANK = """
import os, signal, sys, torch
model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
open("trained", "w").close()
while not os.path.exists("end"):
    pass
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(int(sys.argv[1]))
"""

ODD_BATCHES = """
import dataclasses, torch
from torch.utils.data import DataLoader

@dataclasses.dataclass
class Attention:
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

class Lazy(dict):
    def values(self):
        raise KeyError("not loaded yet")

data = [torch.ones(2) for _ in range(8)]
for make in (lambda items: Attention(*[torch.stack(items)] * 3), Lazy):
    for batch in DataLoader(data, batch_size=4, collate_fn=make):
        print(type(batch).__name__)
"""

GROUPS = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(60):
    dist.destroy_process_group(dist.new_group([0]))
held = len(os.listdir("/proc/self/fd"))
dist.destroy_process_group()
print("descriptors", held)
"""


def run(folder: Path, source: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(source)
    command = [sys.executable, "-m", "model_check", "run", "--run-dir", "out", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("3", 3), ("kill", 128 + signal.SIGKILL)])
def test_a_command_that_is_a_rank_itself_keeps_its_exit_code(tmp_path: Path, how: str, code: int) -> None:
    (tmp_path / "end").touch()
    done = run(tmp_path, RANK, "--", sys.executable, "script.py", how)
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert (done.returncode, verdict["exit_code"], verdict["outcome"]) == (code, code, "failed"), done.stderr


@pytest.mark.slow
def test_a_command_ends_as_ever_after_its_guard_was_killed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RANK)
    command = [sys.executable, "-m", "model_check", "run", "--run-dir", "out", "--", sys.executable, "script.py", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    try:
        while not (tmp_path / "trained").exists():
            assert launcher.poll() is None
        script = json.loads((tmp_path / "out" / "events" / "supervisor.jsonl").read_text().splitlines()[0])
        others = [child for child in psutil.Process(launcher.pid).children() if child.pid != script["command_pid"]]
        guard = next(child for child in others if "model_check" in " ".join(child.cmdline()))
        guard.kill()
        (tmp_path / "end").touch()
        assert launcher.wait(60) == 0
    finally:
        launcher.kill()
        launcher.communicate()
    assert json.loads((tmp_path / "out" / "verdict.json").read_text())["outcome"] == "completed"


@pytest.mark.slow
def test_a_batch_may_be_any_object(tmp_path: Path) -> None:
    done = run(tmp_path, ODD_BATCHES, "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split("] ")[-1] for line in done.stdout.splitlines()] == ["Attention"] * 2 + ["Lazy"] * 2


@pytest.mark.slow
def test_groups_that_were_left_do_not_pile_up(tmp_path: Path) -> None:
    done = run(tmp_path, GROUPS, "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    (held,) = [int(line.split()[-1]) for line in done.stdout.splitlines() if "descriptors" in line]
    assert held < 200
