"""Counting what grows must leave nothing behind in the script."""

from __future__ import annotations

import sys
import weakref

import pytest

from model_check.blackbox import memory_growth


class Tensor:
    """Stands for something large that a function holds for a moment."""


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="frames keep no copy of their locals")
def test_locals_that_were_read_are_not_kept() -> None:
    logits: Tensor | None = Tensor()
    held = weakref.ref(logits)
    names = [name for name, _ in memory_growth._locals_of(sys._getframe())]
    assert "logits" in names
    logits = None
    assert held() is None
