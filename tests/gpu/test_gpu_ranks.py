"""Two ranks of a foreign script share one GPU over gloo (NCCL refuses): the rank that made the bad number is named."""

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
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

waits, bad_step = os.environ["WAITS"] == "1", int(os.environ["BAD_STEP"])
torch.cuda.set_device(0)
dist.init_process_group("gloo")
torch.manual_seed(0)
net = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).cuda())
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(8):
    x = torch.randn(32, 64, device="cuda")
    out = net(x)
    target = out.detach() if dist.get_rank() == 1 and step == bad_step else torch.zeros_like(out)
    loss = (out - target).square().sum(1).sqrt().mean()  # POLE
    loss.backward()
    if waits:
        torch.cuda.synchronize()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("waits", ["1", "0"])
def test_the_rank_the_step_and_the_line_of_a_pole(shell: Shell, waits: str) -> None:
    primary = run_watched(shell, SCRIPT, nproc=2, WAITS=waits, BAD_STEP="4").verdict()["findings"][0]
    assert (primary["code"], primary["ranks"], primary["victims"], primary["step"]) == ("MC402", [1], [0], 4), primary
    assert line_of(str(shell.folder / "train.py"), "POLE") in json.dumps(primary), primary


def test_healthy_ranks_are_left_alone(shell: Shell) -> None:
    told = run_watched(shell, SCRIPT, nproc=2, WAITS="0", BAD_STEP="99").verdict()
    assert (told["outcome"], told["findings"]) == ("completed", [])
