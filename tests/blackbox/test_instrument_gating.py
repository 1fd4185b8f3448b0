"""Which compilations wait for each other: only those that would find the other's work in the cache."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from model_check.blackbox.gate import GATE, Gate, GatePlan, patch_inductor, through_the_gate


@pytest.fixture(autouse=True)
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a rank that was warm-started."""
    monkeypatch.setattr(GATE, "gate", Gate(GatePlan(tmp_path / "gate", 0, patience_s=0.0), 0))
    monkeypatch.setattr(type(GATE), "graphs", {})


def held_while_compiling(device: str, *, fx_graph_cache: bool = True, force_disable_caches: bool = False) -> set[str]:
    def compile_one(graph: Any, inputs: Any) -> set[str]:
        return {name for name, gate in GATE.graphs.items() if gate.held}

    inductor: Any = SimpleNamespace(
        compile_fx=print,
        _compile_fx_inner=compile_one,
        config=SimpleNamespace(fx_graph_cache=fx_graph_cache, force_disable_caches=force_disable_caches),
    )
    patch_inductor(inductor)
    with FakeTensorMode():
        given = torch.empty(2, 3, device=device)
    held: set[str] = inductor._compile_fx_inner(fx.symbolic_trace(torch.nn.ReLU()), [given])
    return held


def test_ranks_on_one_device_wait_for_each_other_and_those_on_others_do_not() -> None:
    first, second = held_while_compiling("cuda:0"), held_while_compiling("cuda:1")
    assert len(first) == len(second) == 1 and first != second
    assert held_while_compiling("cuda:0") == first


@pytest.mark.parametrize("setting", [{"fx_graph_cache": False}, {"force_disable_caches": True}])
def test_without_a_cache_nobody_waits(setting: dict[str, bool]) -> None:
    assert held_while_compiling("cpu", **setting) == set()
    assert len(held_while_compiling("cpu")) == 1


class Interrupted(TimeoutError):
    """What a handler of the script raises."""


def test_a_wait_that_is_interrupted_leaves_nothing_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = GatePlan(tmp_path / "slots", 1, patience_s=60.0, lines=tmp_path / "lines.log")
    monkeypatch.setattr(GATE, "gate", Gate(plan, 0))
    peer = Gate(plan, 1)

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with peer.passing(), pytest.raises(Interrupted):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with through_the_gate("torch.compile", "a graph"):
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not GATE.graphs["a graph"].held
    with through_the_gate("torch.compile", "a graph"):
        assert GATE.gate is not None and GATE.gate.held and GATE.graphs["a graph"].held
