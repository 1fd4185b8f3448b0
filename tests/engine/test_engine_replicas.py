"""Our own trainer writes down the bits of its replicas and of its batches, so that drift can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from model_check.blackbox.box import BOX, RANK_PID_VARIABLE
from model_check.engine.passes import WholeModel
from model_check.engine.precision import Precision
from model_check.numerics.replicas import bit_sum
from model_check.record import RunDir, read_jsonl


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """Rank 0 of a job of two whose peer never answers and never has to."""
    monkeypatch.setenv(RANK_PID_VARIABLE, "0")
    before = BOX.run_dir
    BOX.run_dir = RunDir.create(tmp_path / "run")
    BOX.open(0, world_size=2)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield BOX.run_dir
    dist.destroy_process_group()
    BOX.leave()
    BOX.run_dir = before


def test_the_first_step_writes_parameters_and_batch(run_dir: RunDir) -> None:
    model = DistributedDataParallel(Regression())
    batch = torch.randn(2, 4)
    passes = WholeModel(model, Precision.choose("fp32", torch.device("cpu")), torch.device("cpu"))
    with model.no_sync():  # there is nobody to exchange gradients with
        passes.accumulate([(batch,), (torch.randn(2, 4),)], lambda loss: loss)
    records = [e for e in read_jsonl(run_dir.events(0)).records if e["event"] in ("param_hash", "batch_hash")]
    assert [(e["event"], e["step"], e["group"]) for e in records] == [
        ("batch_hash", 0, [0, 1]),
        ("param_hash", 0, [0, 1]),
    ]
    assert records[0]["hashes"] == {"0": int(bit_sum(batch))}
    assert set(records[1]["hashes"]) == {"body.weight", "body.bias"}
