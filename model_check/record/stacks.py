"""The Python stacks of a process at one moment: `stacks/rank-00001.2.json`, taken by the supervisor, read by the rules.

The second number counts the rounds of the run. A quick look between two rounds appends `.look-3`. The dump of a child
process of the rank also has the child's pid in its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from model_check.record.files import read_json, write_json_atomic
from model_check.record.paths import RunDir
from model_check.record.typed import NOT_STORED, from_json
from model_check.record.user_code import is_door, is_trainer, is_user_file

_RANK_FILE = re.compile(r"rank-(\d+)")
# A frame as faulthandler and tracebacks print it.
FRAME_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)$', re.MULTILINE)


@dataclass(frozen=True)
class Frame:
    """One frame of a Python stack, the path as the interpreter knows it."""

    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""  # the source line
    # The folder that a relative path starts from: the reader's knowledge.
    root: str = field(default="", compare=False, metadata=NOT_STORED)

    @property
    def site(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def is_user_code(self) -> bool:
        """Not torch, the standard library, an installed package, the import machinery, or ourselves."""
        return is_user_file(self.file)

    @property
    def is_program(self) -> bool:
        """The user's code, or our trainer's if that is the program."""
        return self.is_user_code or is_trainer(self.file)

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "function": self.function, "locals": None}


def innermost_user(
    frames: Iterable[Frame], is_user: Callable[[Frame], bool] = lambda frame: frame.is_user_code
) -> Frame | None:
    """The user's line, of frames from the innermost outwards.

    Where our own command line was entered, our trainer is the program, and whatever called it is only a door: then it
    is the innermost line of ours that does the work.
    """
    ours = None
    for frame in frames:
        if is_user(frame):
            return frame
        if ours is None and is_trainer(frame.file):
            ours = frame
        if is_door(frame.file):
            break
    return ours


@dataclass(frozen=True)
class ThreadStack:
    """One thread of a process; frames innermost first."""

    name: str = ""
    ident: int = 0  # as the interpreter counts threads
    native_id: int = 0  # as the kernel does; 0 where it is not known
    active: bool = False  # on a processor at that moment
    gil: bool = False  # held the interpreter lock
    frames: tuple[Frame, ...] = ()

    @property
    def user_frame(self) -> Frame | None:
        return innermost_user(self.frames)

    @property
    def innermost(self) -> Frame | None:
        return self.frames[0] if self.frames else None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "frames": [frame.to_json() for frame in self.frames]}


@dataclass(frozen=True)
class ProcessStacks:
    """All threads of one process at one moment, how they were obtained, and to which rank they belong."""

    pid: int = 0
    t: float = 0.0
    source: str = ""  # py-spy, faulthandler or proc
    threads: tuple[ThreadStack, ...] = ()
    error: str | None = None  # why a better source gave nothing
    rank: int = -1
    process: str = "rank"  # rank, loader_worker or child

    @cached_property
    def main(self) -> ThreadStack | None:
        """The kernel numbers the main thread as the process."""
        by_id = next((t for t in self.threads if t.native_id == self.pid), None)
        by_name = next((t for t in self.threads if t.name == "MainThread"), None)
        return by_id or by_name or (self.threads[-1] if self.threads else None)

    @property
    def is_loader_worker(self) -> bool:
        return any("_worker_loop" in frame.function for thread in self.threads for frame in thread.frames)

    def to_json(self) -> dict[str, Any]:
        return {
            "t": self.t,
            "rank": self.rank,
            "pid": self.pid,
            "source": self.source,
            "process": self.process,
            "threads": [thread.to_json() for thread in self.threads],
            "error": self.error,
        }

    def write(self, run_dir: RunDir, round: str) -> Path:
        name = f"rank-{self.rank:05d}.{round}" + ("" if self.process == "rank" else f".{self.pid}")
        path = run_dir.stacks_dir / f"{name}.json"
        write_json_atomic(path, self.to_json())
        return path


def read_stacks(path: Path, show: Callable[[Frame], Frame] = lambda frame: frame) -> ProcessStacks | None:
    """The dump in this file, with its frames passed through `show`; None if the file is not a dump."""
    body = read_json(path)
    if not isinstance(body, dict):
        return None
    dump = from_json(ProcessStacks, body)
    if dump.rank < 0:
        number = _RANK_FILE.search(path.name)
        if number is None:
            return None
        dump = replace(dump, rank=int(number[1]))
    threads = (replace(thread, frames=tuple(map(show, thread.frames))) for thread in dump.threads)
    return replace(dump, threads=tuple(threads))
