"""The guard: a small process that outlives a killed launcher just long enough to end what the launcher started.

A command that brings its own launcher (torchrun, mp.spawn) has no tie to the ranks below it, which live in their own
sessions. Wherever they are in the process tree, all of them carry the mark of their job in their environment: a random
number that no other process has. The run directory cannot be that mark, since a user's shell may name it too.

The guard spares the children of ranks that had ended cleanly when the launcher was killed: programs that the rank
started, which carry the rank's PID in their environment; processes that it forked, which are in its events; and all
their descendants. If nobody saw how a rank ended, it does not count as clean.
"""

from __future__ import annotations

import os
import select
import signal
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

import psutil

from model_check.blackbox.box import RANK_PID_VARIABLE
from model_check.record import RunDir
from model_check.record.events import read_events
from model_check.record.events.crashes import Fork
from model_check.record.events.job import CLEAN_CODES, RankExit
from model_check.supervise import processes

JOB_VARIABLE = "MODEL_CHECK_JOB"
_DISMISSED = b"."
_ROUNDS = 5  # a process forked during one scan is found by the next


class JobMark:
    """The mark of one job. A job inside another one carries both marks, so that it ends with the outer one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.number = uuid.uuid4().hex
        self._outer = environ.get(JOB_VARIABLE)

    def variables(self) -> dict[str, str]:
        """For the environment of the job's first process. Never for our own: our helpers do not belong to the job."""
        return {JOB_VARIABLE: f"{self._outer}/{self.number}" if self._outer else self.number}

    def holders(self) -> dict[int, dict[str, str]]:
        """Every live process of the job, with its environment."""
        return {
            pid: environment
            for pid in psutil.pids()
            if self.number in (environment := processes.environment_of(pid)).get(JOB_VARIABLE, "").split("/")
            and processes.is_alive(pid)
        }


class Guard:
    """Fork it before any thread is started; leaving the context dismisses it."""

    def __init__(self, mark: JobMark, run_dir: RunDir) -> None:
        self._mark = mark
        self._run_dir = run_dir

    def __enter__(self) -> Guard:
        read_end, self._write_end = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._write_end)
            _stand_guard(read_end, self._mark, self._run_dir)
        os.close(read_end)
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # somebody, or the kernel, has killed the guard
            os.write(self._write_end, _DISMISSED)
        os.close(self._write_end)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _stand_guard(read_end: int, mark: JobMark, run_dir: RunDir) -> NoReturn:
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
            _end_job(mark, run_dir)
    finally:
        os._exit(0)


def _end_job(mark: JobMark, run_dir: RunDir) -> None:
    """Kills every process of the job except the children of its clean ranks."""
    for _ in range(_ROUNDS):
        holders = mark.holders()
        left = holders.keys() - _children_of_clean_ranks(holders, run_dir) - {os.getpid()}
        if not left:
            return
        for pid in left:
            processes.send_signal(pid, signal.SIGKILL)


def _children_of_clean_ranks(holders: Mapping[int, Mapping[str, str]], run_dir: RunDir) -> set[int]:
    ended = [event for event in read_events(run_dir.supervisor_events) if isinstance(event, RankExit)]
    clean = {exit.pid: exit.rank for exit in ended if exit.code in CLEAN_CODES}
    spared = {pid for pid, environment in holders.items() if environment.get(RANK_PID_VARIABLE, "") in map(str, clean)}
    for rank in set(clean.values()):
        forks = (event for event in read_events(run_dir.events(rank)) if isinstance(event, Fork))
        spared.update(fork.child_pid for fork in forks if fork.pid in clean)
    return spared.union(*map(processes.descendants_of, spared))
