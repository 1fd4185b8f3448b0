"""What a rank runs once its process is set up: a function in memory, a function in a new interpreter, a command.

Each program is run by the freshly forked child; it gives back the exit code of the rank, or replaces the process.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_check.errors import LaunchError
from model_check.launch.ranks import run_entry
from model_check.record.rank_context import RankContext

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])

Entry = Callable[[RankContext, Any], None]


@dataclass(frozen=True)
class WarmFunction:
    """A function of the process that was forked: everything it imports is already there."""

    entry: Entry
    payload: Any

    def run(self, context: RankContext) -> int:
        return run_entry(self.entry, context, self.payload)


@dataclass(frozen=True)
class ColdFunction:
    """The same function in a new interpreter, which imports everything again."""

    pickled: bytes

    @classmethod
    def pickle(cls, entry: Entry, payload: Any) -> ColdFunction:
        if entry.__module__ == "__main__":
            raise LaunchError(
                f"{entry.__qualname__} of __main__ cannot be started cold: a new interpreter cannot import it",
                remedy="move it to a module, or use launch.start=warm",
            )
        try:
            # The import path goes first and apart: the rest can be unpickled only once it is in place.
            return cls(pickle.dumps(sys.path) + pickle.dumps((entry, payload)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise LaunchError(
                f"the ranks cannot be started cold: {error}", remedy="pass plain data, or use launch.start=warm"
            ) from error

    def run(self, context: RankContext) -> int:
        # An anonymous file: nothing on disk that somebody else could read or replace.
        fd = os.memfd_create("model-check-entry", 0)
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(self.pickled + pickle.dumps(context))
        os.lseek(fd, 0, os.SEEK_SET)
        os.set_inheritable(fd, True)
        # Our package may have been found through a path that a new interpreter does not have.
        search = [_PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(search)
        os.execv(sys.executable, [sys.executable, "-m", "model_check.launch.coldstart", str(fd)])


@dataclass(frozen=True)
class Command:
    """A program of the user's, given as words; never through a shell.

    stdin_fd: what the program reads as standard input, a descriptor that survives the fork; None: nothing.
    """

    argv: tuple[str, ...]
    stdin_fd: int | None = None

    def run(self, context: RankContext) -> int:
        if self.stdin_fd is not None:
            os.dup2(self.stdin_fd, 0)
        # Python ignores these two, and an ignored signal stays ignored in whatever is executed.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(self.argv[0], self.argv)
        except OSError as error:
            # 127 and 126 are what every shell answers for a command that is missing or may not be run.
            print(f"{self.argv[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
            return 127 if isinstance(error, FileNotFoundError) else 126


Program = WarmFunction | ColdFunction | Command
