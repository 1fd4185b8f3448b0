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


MIB = 1 << 20


def test_objects_are_counted_only_while_memory_grows_mark_after_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count takes a good part of a second, and every script grows once, when it has built its model."""
    monkeypatch.setattr(memory_growth, "_State", type("State", (memory_growth._State,), {}))
    for resident in (200, 300, 300, 310, 300, 302, 330, 330):
        memory_growth.look(resident * MIB)
        assert memory_growth._State.counted is None, f"counted at {resident} MiB"
    memory_growth.look(340 * MIB)
    assert memory_growth._State.counted is None
    memory_growth.look(350 * MIB)
    assert memory_growth._State.counted is not None
