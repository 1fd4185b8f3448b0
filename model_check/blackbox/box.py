"""The black box of this process: its ring and its events, once it is known which rank it is.

There is one, `BOX`. While `BOX.recorder` is None nothing is recorded and every wrapper calls straight through: in a
launcher, in a helper process, in the child of a fork. A forked child never writes to its parent's ring; it opens one of
its own if it turns out to be a rank.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, ParamSpec

from model_check.blackbox.frames import UserCode
from model_check.blackbox.recorder import DTYPE, OP, PHASE, Recorder
from model_check.record.events import Event
from model_check.record.events.memory import RecordingFailed
from model_check.record.files import JsonlWriter
from model_check.record.paths import RunDir
from model_check.record.process_identity import live_pid
from model_check.record.redaction import redact_argv, redact_text
from model_check.record.ring import BEGIN, END, POINT, kind, read_header

RANK_PID_VARIABLE = "MODEL_CHECK_RANK_PID"
GUARD_VARIABLE = "MODEL_CHECK_GUARD"  # holds a GuardMode; unset: off
GuardMode = Literal["observe", "full", "halt", "off"]
Given = ParamSpec("Given")
_STEP_KIND = kind(POINT, PHASE["step"])
_NO_SITE = (0, 0, 0)


class SpanKind:
    """A phase, and the operation in it, with the numbers of its BEGIN and END records worked out once."""

    __slots__ = ("begin", "end")

    def __init__(self, phase: str, op: str = "none") -> None:
        self.begin = kind(BEGIN, PHASE[phase], OP[op])
        self.end = kind(END, PHASE[phase], OP[op])


class _PerThread(threading.local):
    """How deep this thread is inside what is recorded as one, or not at all: only the outermost call is."""

    depth = 0


class BlackBox:
    """What this process records, and where."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.run_dir: RunDir | None = None
        self.code = UserCode()
        self.thread = _PerThread()
        self.may_adopt = False  # a lone script becomes rank 0 of 1 with its first training step
        self.last_site: tuple[int, int, int] = _NO_SITE
        self._events: JsonlWriter | None = None
        self._unwritten: dict[str, str] = {}
        self._lock = threading.Lock()

    # Opening and leaving

    def open(self, rank: int, **identity: Any) -> None:
        """Starts recording as this rank. Opening again as the same rank only adds to what is known about it."""
        with self._lock:
            if self.run_dir is None:
                return
            if self.recorder is not None and self.recorder.rank == rank:
                self.recorder.identify(**identity)
                return
            self.leave()
            self.recorder = Recorder(self.run_dir.ring(rank), rank=rank, **{**self._identity(), **identity})
            self._events = JsonlWriter(self.run_dir.events(rank))
            self.may_adopt = False
            # Inherited by every process that this one starts: they are not this rank.
            os.environ[RANK_PID_VARIABLE] = str(os.getpid())

    def _identity(self) -> dict[str, Any]:
        environ = os.environ
        return {
            "world_size": whole_number(environ, "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
            "local_rank": whole_number(environ, "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
            "attempt": whole_number(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
            "store": environ.get("MASTER_PORT", ""),
            "final": "LOCAL_RANK" in environ,  # all processes of the job are numbered, not only its hosts
            "role": "rank",
            "ppid": os.getppid(),
            "python": sys.version.split()[0],
            "script": self.code.script,
            "cwd": self.code.cwd,
            "argv": redact_argv(sys.orig_argv, os.environ),
            "torch": None,
            "backend": None,
            "service": None,
            "stack_signal": None,
        }

    def leave(self) -> None:
        """Stops recording here; the files stay as they are."""
        self.recorder = None
        self.last_site = _NO_SITE
        self.thread = _PerThread()
        if self._events is not None:
            self._events.close()
            self._events = None

    def adopt(self) -> Recorder | None:
        """A script that trains without ever being told a rank is rank 0 of 1, unless another process is rank 0."""
        if not self.may_adopt or self.run_dir is None:
            return self.recorder
        self.may_adopt = False
        try:
            if live_pid(read_header(self.run_dir.ring(0))) is None:
                self.open(0, world_size=1, local_rank=0)
        except Exception as error:  # a full disk, say, in the middle of the script's first step
            self.give_up(error)
        return self.recorder

    def give_up(self, error: BaseException) -> None:
        """Something of ours failed: the script must not. It runs on without being recorded."""
        self.event(RecordingFailed.by(error))
        if self.recorder is not None:
            # In the ring, whose space is reserved: the silence of this rank must not look like a hang.
            self.recorder.identify(gave_up=type(error).__name__)
        self.leave()

    # Records

    def site(self, recorder: Recorder) -> tuple[int, int, int]:
        """(file id, line, function id) of the user's innermost line; on a thread without one, the last known."""
        found = self.code.innermost(sys._getframe(1))
        if found is None:
            return self.last_site
        shown, line, name = found
        ids = recorder.ids
        file, function = ids.get(shown), ids.get(name)
        if file is None or function is None:
            file, function = recorder.intern(shown), recorder.intern(name)
        self.last_site = site = (file, line, function)
        return site

    def begin(self, recorder: Recorder, what: SpanKind, detail: str = "") -> int:
        """Writes the BEGIN of a span at the user's line, and returns its number."""
        file, line, function = self.site(recorder)
        return recorder.put(what.begin, file, line, function, recorder.intern(detail) if detail else 0)

    def end(self, recorder: Recorder, what: SpanKind, span: int, detail: str = "") -> None:
        if recorder is self.recorder:
            recorder.put(what.end, 0, 0, 0, recorder.intern(detail) if detail else 0, span)

    def step_done(self, recorder: Recorder) -> None:
        recorder.put(_STEP_KIND, *self.last_site)
        recorder.steps += 1

    def continue_at(self, step: int) -> None:
        """A trainer has gone back or on to a checkpoint: its next step has this number, also if it is done again."""
        if self.recorder is not None:
            self.recorder.steps = step

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """What this thread does inside is no part of the training: none of its collectives and steps counts."""
        thread = self.thread
        thread.depth += 1
        try:
            yield
        finally:
            thread.depth -= 1

    # Events

    def event(self, event: Event) -> None:
        """Appends to the rank's events, without secrets. Does nothing once another process has become this rank."""
        events, recorder = self._events, self.recorder
        if events is None or recorder is None or not recorder.is_current():
            return
        try:
            body = event.body().items()
            told = {key: redact_text(value) if isinstance(value, str) else value for key, value in body}
            events.write({"t": event.t or time.monotonic(), "event": event.kind, "pid": os.getpid(), **told})
        except OSError as error:
            # A full disk under the run directory is our trouble: raised here, it would be the script's. The ring, whose
            # pages exist, goes on, and the next event may find room again.
            self.unwritten("events", error)

    def unwritten(self, name: str, error: Exception) -> bool:
        """Notes in the ring, whose space is reserved, that a file of ours cannot be written; True the first time."""
        if name in self._unwritten:
            return False
        self._unwritten[name] = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"[
            :80
        ]
        if self.recorder is not None:
            self.recorder.identify(unwritten=dict(self._unwritten))
        return True


BOX = BlackBox()


@dataclass
class StepFollower:
    """The hook through which the black box tells another package of every step, without importing that package.

    The module with this name is imported only at the first step, because it needs torch fully imported.
    """

    module: str = ""

    def load(self) -> ModuleType | None:
        return importlib.import_module(self.module) if self.module else None

    @property
    def loaded(self) -> ModuleType | None:
        """None before the first step, and if no module follows."""
        return sys.modules.get(self.module)


FOLLOWER = StepFollower()


def harmless(note: Callable[Given, None]) -> Callable[Given, None]:
    """For notes that are taken inside the script's calls and handlers: a failure of ours is recorded, not raised."""

    @functools.wraps(note)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> None:
        try:
            note(*args, **kwargs)
        except Exception as error:
            with suppress(Exception):
                BOX.event(RecordingFailed(error=f"{type(error).__name__}: {error}", what=note.__qualname__))

    return call


def whole_number(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is a whole number."""
    for name in names:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def rank_from_environment(environ: Mapping[str, str]) -> int | None:
    """This process's rank as its launcher says it: torchrun's variables, Slurm's, or Open MPI's."""
    for rank, size in (
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ):
        if whole_number(environ, size) is not None and (found := whole_number(environ, rank)) is not None:
            return found
    return None


__all__ = [
    "BOX",
    "DTYPE",
    "FOLLOWER",
    "GUARD_VARIABLE",
    "OP",
    "PHASE",
    "BlackBox",
    "GuardMode",
    "SpanKind",
    "harmless",
    "rank_from_environment",
    "whole_number",
]
