"""The gate: at most K ranks of a host do heavy work (imports, compilations) at once. Imports nothing heavy itself.

Of ranks that compile the same graph only one does, however many slots there are: the others load what it left in the
cache that they share.

A slot is a file under `fcntl.flock`: the kernel gives it back when its holder dies, whatever killed it. A rank holds a
slot only while it imports or compiles, which waits for no other rank, and lets go at the latest when it joins a process
group or starts a collective; so nobody who waits at the gate is waited for by somebody who holds it. A holder that is
stopped is no reason to wait forever: after `patience_s` a rank goes on without a slot, and says so.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from model_check.blackbox.spans import span

FOLDER_VARIABLE = "MODEL_CHECK_GATE_DIR"
SLOTS_VARIABLE = "MODEL_CHECK_GATE_SLOTS"
PATIENCE_VARIABLE = "MODEL_CHECK_GATE_PATIENCE_S"
LINES_VARIABLE = "MODEL_CHECK_GATE_LINES"
DEFAULT_PATIENCE_S = 120.0
_LOOK_AGAIN_S = 0.02


@dataclass(frozen=True)
class GatePlan:
    """Where the slots are, how many, how long a rank waits for one, and where it says so (None: standard error).

    One file for all ranks keeps their lines in the order in which things happened. No slots: ranks that were
    warm-started have nothing left to import, and only compilations of one graph wait for each other.
    """

    folder: Path
    slots: int
    patience_s: float = DEFAULT_PATIENCE_S
    lines: Path | None = None
    quiet: bool = False

    @classmethod
    def in_run_dir(cls, root: Path, slots: int, *, followed: bool = False) -> GatePlan:
        """The gate of this host: hosts that share the run directory do not share their memory."""
        folder = root / "gate" / os.uname().nodename
        return cls(folder, slots, lines=folder / "lines.log" if followed else None)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> GatePlan | None:
        """What `variables` said, in a process that the launcher started; None where there is no gate."""
        folder, slots = environ.get(FOLDER_VARIABLE), environ.get(SLOTS_VARIABLE, "")
        if not folder or not slots.isdigit():
            return None
        patience_s = float(environ.get(PATIENCE_VARIABLE, DEFAULT_PATIENCE_S))
        lines = environ.get(LINES_VARIABLE)
        return cls(Path(folder), int(slots), patience_s, Path(lines) if lines else None)

    def of_graph(self, name: str) -> GatePlan:
        """For the ranks that are about to compile this graph: one after the other, without a word."""
        return replace(self, folder=self.folder / "graphs" / name, slots=1, quiet=True)

    def variables(self) -> dict[str, str]:
        """For the environment of every rank."""
        return {
            FOLDER_VARIABLE: str(self.folder),
            SLOTS_VARIABLE: str(self.slots),
            PATIENCE_VARIABLE: str(self.patience_s),
            **({LINES_VARIABLE: str(self.lines)} if self.lines is not None else {}),
        }


class Gate:
    """One rank's way through the gate. Passing again while inside is free; other threads of the rank go along."""

    def __init__(self, plan: GatePlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self._depth = 0
        self._fd = -1
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._forget)

    @property
    def held(self) -> bool:
        return self._fd >= 0

    def release(self) -> None:
        """Gives the slot back now, however deep the caller is: what comes next may wait for other ranks."""
        with self._lock:
            if self._fd >= 0:
                self._line("released")  # before it is true, so that nobody's "acquired" can come first
                os.close(self._fd)
                self._fd = -1

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Holds a slot; goes on without one when patience ends, or where files cannot be locked."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._acquire_if_possible()
        try:
            yield
        finally:
            with self._lock:
                self._depth = max(0, self._depth - 1)
                if self._depth == 0:
                    self.release()

    def _acquire_if_possible(self) -> None:
        try:
            self._acquire()
        except BaseException as error:
            if isinstance(error, OSError) and error.errno is not None:
                self._line(f"not used, {self.plan.folder} cannot be locked ({error.strerror}); going on")
                return
            # A handler of the script's raised in the middle of the wait; its TimeoutError bears no number.
            self._depth = 0
            self.release()
            raise

    def _acquire(self) -> None:
        if self.plan.slots == 0:
            return
        self.plan.folder.mkdir(parents=True, exist_ok=True)
        if not self._try_all():
            self._line("waiting for exclusive access...")
            deadline = time.monotonic() + self.plan.patience_s
            while not self._try_all():
                if time.monotonic() > deadline:
                    self._line(f"no slot became free in {self.plan.patience_s:g} s; going on without one")
                    return
                time.sleep(_LOOK_AGAIN_S)
        self._line("acquired! Starting initialization...")

    def _try_all(self) -> bool:
        for number in range(self.plan.slots):
            # Not inherited by what the rank executes: a lock lives as long as its last descriptor.
            fd = os.open(self.plan.folder / f"slot-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            except OSError:
                os.close(fd)
                raise
            self._fd = fd
            return True
        return False

    def _forget(self) -> None:
        """A forked child shares the lock: closing its copy leaves it with the parent alone."""
        self._lock = threading.RLock()
        self._depth = 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _line(self, text: str) -> None:
        if self.plan.quiet:
            return
        line = f"[Rank {self.rank}] LOCK: {text}\n"
        if self.plan.lines is None or not _append(self.plan.lines, line):
            sys.stderr.write(line)  # in one write: under a foreign launcher all ranks share one stream
            sys.stderr.flush()


def _append(path: Path, line: str) -> bool:
    """Whether the line is in the file: a full disk must not keep a rank from its imports."""
    try:
        with path.open("ab", buffering=0) as file:
            file.write(line.encode())
    except OSError:
        return False
    return True


class _OfThisRank:
    """The gate of this process, and those of the graphs that it has compiled.

    None in every process but a rank whose launcher set one up: everything below then calls straight through.
    """

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
