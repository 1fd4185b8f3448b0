"""What every test of the rules begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
from staging import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)
