"""The script's own loss code on a GPU: that it went wrong is known after its backward, and still its line is named.

Nobody waits for the device in these scripts; what the guard holds on to of the loss code tells.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.conftest import Shell
from tests.gpu.watched_script import run_watched
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


@pytest.mark.parametrize(("fault", "code"), [("mask", "MC408"), ("ignored", "MC408"), ("pole", "MC402")])
def test_the_line_that_failed(shell: Shell, fault: str, code: str) -> None:
    primary = run_watched(shell, SCRIPT, FAULT=fault).verdict()["findings"][0]
    assert (primary["code"], primary["step"]) == (code, 4), primary
    assert line_of(str(shell.folder / "train.py"), fault) in json.dumps(primary), primary


def test_the_sample_whose_target_is_not_finite(shell: Shell) -> None:
    primary = run_watched(shell, SCRIPT, FAULT="target").verdict()["findings"][0]
    assert (primary["code"], primary["step"]) == ("MC404", 4), primary
    assert "of sample 5" in json.dumps(primary)


def test_healthy_loss_code_is_left_alone(shell: Shell) -> None:
    told = run_watched(shell, SCRIPT, FAULT="none").verdict()
    assert (told["outcome"], told["findings"]) == ("completed", [])
