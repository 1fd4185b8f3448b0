"""Our own trainer reports replicas that hold different weights; with only two, it calls neither wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = '''
import os
import torch
from model_check import DDPTrainer

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Net(torch.nn.Module):
    """Its first weight is changed once, by itself: as by memory that lost a bit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 5 and rank == world - 1:
            with torch.no_grad():
                self.first.weight[2, 3] += 0.5
        return self.last(self.first(x)).square().mean()


settings = {"training": {"batch_size": 4, "context_length": 16, "learning_rate": 1e-2, "precision": "fp32"}}
data = [(torch.randn(4, 8) + rank,)]
DDPTrainer(Net(), settings, "cpu", rank=rank, world_size=world, data=data).train(num_steps=25)
'''


def drift(folder: Path, world: int) -> dict[str, Any]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "model_check", "run", "--nproc", str(world), "--run-dir", "run", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=120, capture_output=True)
    found = json.loads((folder / "run" / "verdict.json").read_text())["findings"]
    (drifted,) = [finding for finding in found if finding["code"] == "MC410"]
    return dict(drifted)


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_of_two_ranks_neither_is_called_wrong(tmp_path: Path) -> None:
    found = drift(tmp_path, 2)
    assert found["title"] == "ranks 0 and 1 hold different values of first.weight: neither can be called wrong"
    assert (found["ranks"], found["victims"], found["step"]) == ([0, 1], [], 10)
    assert "inferred: two ranks have no majority: nothing says which of them is right" in found["evidence"]
    assert not [line for line in found["fix"] if "named rank" in line], found["fix"]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_of_three_ranks_the_odd_one_is_named(tmp_path: Path) -> None:
    found = drift(tmp_path, 3)
    assert (found["ranks"], found["victims"]) == ([2], [0, 1])
    assert found["title"] == "rank 2 holds another value of first.weight than its peers"
