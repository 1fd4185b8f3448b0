"""The guard: a small process that outlives a killed launcher just long enough to end what the launcher started.

A launcher that brings its own launcher (torchrun, mp.spawn) has no tie to the ranks below it, which live in sessions
of their own. All of them carry the run directory in their environment, wherever they hang in the process tree; that
is how the guard finds them.
"""

from __future__ import annotations

import os
import select
import signal
from types import TracebackType
from typing import NoReturn

from model_check.launch.processes import processes_with_environment

RUN_DIR_VARIABLE = "MODEL_CHECK_RUN_DIR"
_DISMISSED = b"."
_ROUNDS = 5  # a process forked during one scan is found by the next


class Guard:
    """Fork it before any thread is started; leaving the context dismisses it."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir

    def __enter__(self) -> Guard:
        read_end, self._write_end = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._write_end)
            _stand_guard(read_end, self._run_dir)
        os.close(read_end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._write_end, _DISMISSED)
        os.close(self._write_end)
        os.waitpid(self._pid, 0)


def _stand_guard(read_end: int, run_dir: str) -> NoReturn:
    """The child's whole life: it waits for a word from the launcher, or for the silence of its death."""
    try:
        os.setsid()  # Ctrl-C at the terminal is for the launcher and its job
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # a held pipe would keep `model-check run … | tee` from ending
            os.dup2(nothing, stream)
        select.select([read_end], [], [])
        if os.read(read_end, 1) != _DISMISSED:
            end_marked(run_dir)
    finally:
        os._exit(0)


def end_marked(run_dir: str) -> None:
    """Kills every process that was started under this run directory."""
    for _ in range(_ROUNDS):
        left = [pid for pid in processes_with_environment(RUN_DIR_VARIABLE, run_dir) if pid != os.getpid()]
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # gone meanwhile, or no longer ours
