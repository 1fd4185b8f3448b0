"""A checkpoint of bf16 weights with low halves continues in fp32, and the other way, without rounding a weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from model_check.checkpoint.peers import Peers
from model_check.checkpoint.saver import Saver
from model_check.checkpoint.shards import load_into
from model_check.checkpoint.verify import Checkpoint, verify
from model_check.engine import resume
from model_check.engine.resume import carry_masters
from model_check.engine.split_adamw import SplitAdamW, master_of


class Trained:
    """Two matrices after a few steps, in fp32 or in bf16 with low halves."""

    def __init__(self, dtype: torch.dtype, *, steps: int = 0) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 3, bias=False)).to(dtype)
        self.optimizer = SplitAdamW(self.model.parameters(), lr=1e-4)
        for _ in range(steps):
            self.model(torch.randn(4, 8, dtype=dtype)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def masters(self) -> list[torch.Tensor]:
        return [master_of(p.data, self.optimizer.state[p].get("low")).clone() for p in self.model.parameters()]

    def save(self, folder: Path) -> Checkpoint:
        saver = Saver(folder, Peers(), name="run", background=False)
        state = {**resume.model_tensors(self.model), **resume.optimizer_tensors(self.model, self.optimizer)}
        saver.save(4, state, {"step": 4})
        (saved,) = saver.poll()
        return verify(saved.path)

    def restore(self, checkpoint: Checkpoint) -> None:
        resume.materialize_optimizer(self.optimizer)
        state = {**resume.model_tensors(self.model), **resume.optimizer_tensors(self.model, self.optimizer)}
        stored = checkpoint.manifest
        load_into(checkpoint.path, stored, {k: v for k, v in state.items() if k in stored.tensors})
        carry_masters(checkpoint.path, stored, self.model, self.optimizer)


@pytest.mark.parametrize("there", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("here", [torch.bfloat16, torch.float32])
def test_every_bit_of_the_master_is_carried(tmp_path: Path, there: torch.dtype, here: torch.dtype) -> None:
    saved, resumed = Trained(there, steps=5), Trained(here)
    resumed.restore(saved.save(tmp_path))
    for ours, theirs in zip(resumed.masters(), saved.masters(), strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, ours.bfloat16().float()), "the low half is not empty"


def test_there_and_back_changes_nothing(tmp_path: Path) -> None:
    first, second, third = Trained(torch.bfloat16, steps=5), Trained(torch.float32), Trained(torch.bfloat16)
    second.restore(first.save(tmp_path))
    third.restore(second.save(tmp_path))
    for one, other in zip(first.model.parameters(), third.model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(first.optimizer.state[one]["low"], third.optimizer.state[other]["low"])
