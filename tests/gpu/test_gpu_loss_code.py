"""The script's own loss code on a GPU: that it went wrong is known after its backward, and still its line is named.

Nobody waits for the device in these scripts; what the guard holds on to of the loss code tells.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.marked_lines import line_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPT = """
import math, os
import torch
from torch import nn
from torch.nn import functional as F

fault, bad_step = os.environ["FAULT"], 4
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(8):
    now = fault if step == bad_step else "none"
    out = net(torch.randn(32, 64, device="cuda"))
    mask = torch.full((32,), float(now != "mask"), device="cuda")
    wanted = torch.zeros(32, 8, device="cuda")
    wanted[5] = math.inf if now == "target" else 0.0
    labels = torch.full((32,), -100 if now == "ignored" else 1, device="cuda")
    distance = (out - (out.detach() if now == "pole" else 0)).square().sum(1)
    loss = (distance * mask).sum() / mask.sum()  # mask
    loss = loss + F.mse_loss(out, wanted)
    loss = loss + F.cross_entropy(out, labels)  # ignored
    loss = loss + distance.sqrt().mean()  # pole
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def verdict(folder: Path, fault: str) -> dict[str, Any]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    run_dir = folder / "run"
    ended = subprocess.run(
        [sys.executable, "-m", "model_check", "run", "--nproc", "1", "--run-dir", str(run_dir), str(script)],
        env={**os.environ, "FAULT": fault},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((run_dir / "verdict.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("fault", "code"), [("mask", "MC408"), ("ignored", "MC408"), ("pole", "MC402")])
def test_the_line_that_failed(tmp_path: Path, fault: str, code: str) -> None:
    primary = verdict(tmp_path, fault)["findings"][0]
    assert (primary["code"], primary["step"]) == (code, 4), primary
    assert line_of(str(tmp_path / "train.py"), fault) in json.dumps(primary), primary


def test_the_sample_whose_target_is_not_finite(tmp_path: Path) -> None:
    primary = verdict(tmp_path, "target")["findings"][0]
    assert (primary["code"], primary["step"]) == ("MC404", 4), primary
    assert "of sample 5" in json.dumps(primary)


def test_healthy_loss_code_is_left_alone(tmp_path: Path) -> None:
    told = verdict(tmp_path, "none")
    assert (told["outcome"], told["findings"]) == ("completed", [])
