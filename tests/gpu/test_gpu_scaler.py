"""A foreign script in float16 with a GradScaler on a GPU: what never fits is named, what is skipped at times is not."""

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
import os
import torch
from torch import nn

fault = os.environ["FAULT"]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24 if fault == "none" else 64.0, growth_interval=8)
for step in range(32):
    bad = step >= 4
    x = torch.randn(8, 16, device="cuda") * (1e6 if bad and fault == "overflow" else 1.0)
    mask = torch.full((8,), 0.0 if bad and fault == "mask" else 1.0, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(x)  # overflow
    loss = (out.float().square().mean(1) * mask).sum() / mask.sum()  # mask
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print("scale", scaler.get_scale())
"""


@pytest.mark.parametrize(("fault", "code"), [("overflow", "MC403"), ("mask", "MC408")])
def test_steps_that_are_left_out_in_a_row_have_a_cause_and_a_line(shell: Shell, fault: str, code: str) -> None:
    primary = run_watched(shell, SCRIPT, FAULT=fault).verdict()["findings"][0]
    assert primary["code"] == code, primary
    assert line_of(str(shell.folder / "train.py"), fault) in json.dumps(primary), primary
    assert "steps in a row were left out" in json.dumps(primary)


def test_a_scaler_that_finds_its_scale_is_healthy(shell: Shell) -> None:
    done = run_watched(shell, SCRIPT, FAULT="none")
    told = done.verdict()
    assert (told["outcome"], told["findings"]) == ("completed", [])
    assert 1 < float(done.out.partition("scale ")[2].split()[0]) < 2.0**24, "it skipped, and trained on"
