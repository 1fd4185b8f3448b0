"""Scripts of a test, written to a folder of their own and run with the black box injected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from model_check.blackbox import native_collectives
from model_check.record import RunDir
from tests.blackbox.observed_runs import Outcome, Runner, run_ranks


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / "user" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def run(tmp_path: Path, script: Callable[[str], Path]) -> Runner:
    """Runs the text of a script as rank 0 of 1 unless told otherwise."""
    count = 0

    def go(text: str, *, world: int | None = 1, **how: Any) -> Outcome:
        nonlocal count
        count += 1
        return run_ranks(script(text), RunDir.create(tmp_path / f"run-{count}"), world=world, **how)

    return go


@pytest.fixture
def lone_group() -> Iterator[None]:
    """A process group of this process alone, whose collectives pass the dispatcher's kernels."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    native_collectives.install()
    yield
    native_collectives.uninstall()
    dist.destroy_process_group()
