"""The numerics faults once more with every tensor on a GPU, where a bad number is known later than on the CPU.

Two ranks share one GPU over gloo: NCCL wants one for each.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from expectations import FAULTS, SCRIPTS, Fault
from faultrun import observe_fault, why_not_here

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

NUMERICS = (
    "nan_sample",
    "sqrt_at_zero",
    "root_in_loss",
    "half_overflow",
    "rate_spike",
    "exploding",
    "empty_mask",
    "weights_too_large",
    "log_of_zero",
    "replica_drift",
    "loss_spike",
    "dead_layer",
    "rate_too_small",
    "penalty_sign",
    "clip_raises",
    "nan_loss_raises",
    "nan_loss_exits",
    "loss_too_large",
)


@dataclass(frozen=True)
class OnGpu(Fault):
    """The same script, in a folder of its own, with the GPU as its default device."""

    folder: Path = SCRIPTS

    @property
    def path(self) -> Path:
        return self.folder / f"{self.script or self.name}.py"

    def written(self) -> OnGpu:
        text = super().path.read_text()
        assert text.count("\nimport torch\n") == 1
        self.folder.mkdir()
        self.path.write_text(text.replace("\nimport torch\n", '\nimport torch; torch.set_default_device("cuda")\n'))
        shutil.copy(SCRIPTS / "faultclock.py", self.folder)
        return self


@pytest.mark.parametrize("name", NUMERICS)
def test_the_fault_is_named_on_a_gpu(name: str, tmp_path: Path) -> None:
    if reason := why_not_here("gpu"):
        pytest.skip(reason)
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    # Whose numbers overflow first is decided by the random numbers, and those of a GPU are others.
    as_it_happens = {"ranks": None} if name == "exploding" else {}
    on_gpu = OnGpu(**{**vars(fault), **as_it_happens}, folder=tmp_path / "script").written()
    seen = observe_fault(on_gpu, tmp_path)
    assert seen.problems == [], f"{seen.problems}\n{seen.output[-4000:]}"
