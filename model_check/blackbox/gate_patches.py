"""Takes a rank through the gate (observe.gate) around heavy imports and compilations, where its launcher set one up.

`GATE.gate` is None in every other process, and everything here then calls straight through.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, ClassVar

from model_check.blackbox.gate import Gate, GatePlan
from model_check.blackbox.spans import span


class _OfThisRank:
    """The gate of this process, once it is known to be a rank, and those of the graphs that it has compiled."""

    gate: Gate | None = None
    graphs: ClassVar[dict[str, Gate]] = {}


GATE = _OfThisRank()


def open_for(rank: int) -> None:
    """Called when the process learns its rank; does nothing without a plan in the environment."""
    plan = GatePlan.from_environment(os.environ)
    if plan is not None and GATE.gate is None:
        GATE.gate = Gate(plan, rank)


def let_go() -> None:
    """Before anything that waits for other ranks."""
    for gate in (GATE.gate, *GATE.graphs.values()):
        if gate is not None and gate.held:
            gate.release()


@contextmanager
def through_the_gate(what: str, graph: str = "") -> Iterator[None]:
    """Holds a slot while the block runs, alone with the graph if it has one; the wait is a span of phase `gate`."""
    gate = GATE.gate
    if gate is None:
        yield
        return
    if graph and graph not in GATE.graphs:
        GATE.graphs[graph] = Gate(gate.plan.of_graph(graph), gate.rank)
    # Who waits for the graph holds no slot meanwhile: another graph may have it.
    gates = [GATE.graphs[graph], gate] if graph else [gate]
    with ExitStack() as entered:
        with span("gate", what):
            for each in gates:
                entered.enter_context(each.passing())
        yield


def patch_inductor(module: ModuleType) -> None:
    """torch._inductor.compile_fx gets a span, and below it the gate stands: where one graph is looked up in the cache
    or else compiled, that of a backward pass when it first runs. The first rank fills the cache, the next ones load.
    """
    module.compile_fx = _spanned(module.compile_fx)  # type: ignore[attr-defined]
    module._compile_fx_inner = _gated(module._compile_fx_inner, module.config)  # type: ignore[attr-defined]


def _gated(compile_one: Callable[..., Any], config: Any) -> Callable[..., Any]:
    @functools.wraps(compile_one)
    def gated(*args: Any, **kwargs: Any) -> Any:
        if GATE.gate is None:
            return compile_one(*args, **kwargs)
        # Without a cache nothing would be left for those who wait.
        cached = config.fx_graph_cache and not config.force_disable_caches
        with through_the_gate("torch.compile", _name_of_graph(*args) if cached else ""):
            return compile_one(*args, **kwargs)

    return gated


def _spanned(compile_fx: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_fx)
    def spanned(*args: Any, **kwargs: Any) -> Any:
        with span("compile", "torch.compile"):
            return compile_fx(*args, **kwargs)

    return spanned


def _name_of_graph(graph: Any = None, inputs: Any = (), *_: Any) -> str:
    """The same on all ranks that would find each other's work in the cache; empty where it cannot be told.

    The cache knows devices by their numbers: ranks that see all GPUs share nothing, and must not wait for each other.
    """
    code = getattr(graph, "code", None)
    if not isinstance(code, str):
        return ""
    facts = [
        (type(value).__name__, *(str(getattr(value, fact, "")) for fact in ("shape", "dtype", "device")))
        for value in inputs
    ]
    return hashlib.sha256(f"{code}{facts}".encode()).hexdigest()[:16]
