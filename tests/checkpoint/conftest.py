"""A lineage to save into, for the tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_making import Lineage

from model_check.checkpoint.saver import Retention


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    return Lineage(tmp_path / "checkpoints", retention=Retention(last=10))
