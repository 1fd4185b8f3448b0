"""The nursery: one quiet process that every rank is forked from, and that tells the launcher when one ends.

The launcher cannot fork ranks itself: it has threads (rendezvous, console) and stores, which a forked child must not
inherit. The nursery is forked once, right after the imports, while the launcher is still a single thread; it does
no tensor work, starts no CUDA, and only forks, signals and waits. When the launcher goes away, by whatever cause, the
nursery kills every running rank with all of its descendants.

If a rank fails, the processes it left running are killed too. Children of a clean rank live on. The nursery adopts
them, so that a second Ctrl-C can end them while the job runs; when the nursery ends, init inherits them.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from model_check.errors import LaunchError
from model_check.launch import orphans
from model_check.launch.limits import limit_address_space
from model_check.launch.programs import Program, WarmFunction
from model_check.launch.ranks import (
    SIGNALS_OF_A_RANK,
    become_rank,
    finish_interpreter,
    forget_launcher,
    prepare_interpreter,
)
from model_check.record.rank_context import RankContext
from model_check.record.rank_exits import CLEAN_CODES
from model_check.supervise import processes

_PARENT_CHECK_S = 1.0


@dataclass(frozen=True)
class StartRank:
    """Launcher to nursery: fork this rank."""

    context: RankContext
    env: dict[str, str]
    log: Path


@dataclass(frozen=True)
class SignalRank:
    """Launcher to nursery: signal the rank, or with `tree` its whole process group."""

    pid: int
    number: int
    tree: bool = False


@dataclass(frozen=True)
class EndOrphans:
    """Launcher to nursery: end everything that is left of the job, including children of clean ranks."""


@dataclass(frozen=True)
class Ready:
    """Nursery to launcher: I exist. `cuda_spoiled`: CUDA was started before the fork, so no rank could use it."""

    cuda_spoiled: bool


@dataclass(frozen=True)
class RankStarted:
    """Nursery to launcher: the rank lives."""

    rank: int
    pid: int
    at_monotonic: float


@dataclass(frozen=True)
class RankRefused:
    """Nursery to launcher: the system would not fork."""

    rank: int
    reason: str


@dataclass(frozen=True)
class RankEnded:
    """Nursery to launcher: the rank is gone; exactly one of code and signal is set."""

    pid: int
    code: int | None
    signal: int | None
    at_monotonic: float


class Nursery:
    """The launcher's end: start and signal ranks, and hear of their ends in the order in which they came."""

    def __init__(self, program: Program, *, address_space_gb: float | None = None) -> None:
        self._channel, theirs = Pipe()
        launcher_pid = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = _fork()
        if self.pid == 0:
            self._channel.close()
            _serve(theirs, program, launcher_pid, address_space_gb)
        theirs.close()
        self._running: set[int] = set()
        ready = self._receive(timeout_s=30.0)
        self.cuda_spoiled = isinstance(ready, Ready) and ready.cuda_spoiled

    def send(self, message: StartRank | SignalRank | EndOrphans) -> None:
        try:
            self._channel.send(message)
        except OSError:
            raise self._lost() from None

    def messages(self, timeout_s: float) -> Iterator[RankStarted | RankRefused | RankEnded]:
        """What has happened; waits up to the timeout for the first message, and for no other."""
        while (message := self._receive(timeout_s)) is not None:
            if isinstance(message, RankStarted):
                self._running.add(message.pid)
            elif isinstance(message, RankEnded):
                self._running.discard(message.pid)
            yield message
            timeout_s = 0.0

    def close(self) -> None:
        """Ends the nursery, and with it every rank that is left."""
        if self._channel.closed:
            return
        self._channel.close()
        os.waitpid(self.pid, 0)

    def _receive(self, timeout_s: float) -> Any:
        try:
            return self._channel.recv() if self._channel.poll(max(0.0, timeout_s)) else None
        except (EOFError, OSError):
            raise self._lost() from None

    def _lost(self) -> LaunchError:
        """The kernel ends the ranks of a killed nursery. We must end the processes that the ranks started."""
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._running.clear()
        return LaunchError(
            f"the process that starts the ranks (pid {self.pid}) was killed, and the ranks with it",
            remedy="see the kernel log for an out-of-memory kill",
        )


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns when other threads exist; those of BLAS, made at import, survive a fork by their own hooks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(channel: Connection, program: Program, launcher_pid: int, address_space_gb: float | None) -> NoReturn:
    """The nursery's whole life."""
    status = 1
    try:
        os.setsid()  # Ctrl-C at the terminal reaches the launcher alone, which tells the ranks in its own way
        ignored = frozenset(n for n in SIGNALS_OF_A_RANK if signal.getsignal(n) is signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        orphans.adopt_orphans()
        gc.freeze()  # the collector must not touch, and so copy, the pages that the ranks share
        _NurseryLoop(channel, program, launcher_pid, address_space_gb, ignored).run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@dataclass
class _NurseryLoop:
    """Waits for requests of the launcher and for the ends of ranks. `_ignored`: signals that the launcher ignores."""

    _channel: Connection
    _program: Program
    _launcher_pid: int
    _address_space_gb: float | None
    _ignored: frozenset[int]

    def __post_init__(self) -> None:
        self._pids: set[int] = set()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake_write)
        signal.signal(signal.SIGCHLD, _wake_only)

    def run(self) -> None:
        self._send(Ready(cuda_spoiled=_cuda_spoiled()))
        channel = self._channel.fileno()
        while os.getppid() == self._launcher_pid:
            readable, _, _ = select.select([channel, self._wake_read], [], [], _PARENT_CHECK_S)
            if self._wake_read in readable:
                os.read(self._wake_read, 4096)
            self._reap()
            if channel in readable:
                try:
                    request = self._channel.recv()
                except (EOFError, OSError):
                    break  # the launcher is gone
                self._obey(request)
        self._reap()
        for pid in self._pids:
            _kill_tree(pid, signal.SIGKILL)

    def _obey(self, request: StartRank | SignalRank | EndOrphans) -> None:
        if isinstance(request, StartRank):
            self._start(request)
        elif isinstance(request, EndOrphans):
            for pid in processes.descendants_of(os.getpid()):
                processes.send_signal(pid, signal.SIGKILL)
        elif request.pid in self._pids:
            if request.tree:
                _kill_tree(request.pid, request.number)
            else:
                os.kill(request.pid, request.number)

    def _start(self, request: StartRank) -> None:
        nursery_pid = os.getpid()
        try:
            pid = _fork()
        except OSError as error:
            self._send(RankRefused(request.context.rank, error.strerror or str(error)))
            return
        if pid == 0:
            self._live_as_rank(request, nursery_pid)
        self._pids.add(pid)
        self._send(RankStarted(request.context.rank, pid, time.monotonic()))

    def _live_as_rank(self, request: StartRank, nursery_pid: int) -> NoReturn:
        code = 1
        try:
            become_rank(nursery_pid, self._launcher_pid, self._ignored, request.env, request.log)
            if self._address_space_gb is not None:
                limit_address_space(self._address_space_gb)
            self._channel.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            if isinstance(self._program, WarmFunction):
                forget_launcher()
                prepare_interpreter()
            code = self._program.run(request.context)
        except BaseException:
            traceback.print_exc()
        finally:
            finish_interpreter(code)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in self._pids:
                self._end_rank(ended)
            else:
                orphans.collect([ended.si_pid])

    def _end_rank(self, ended: os.waitid_result) -> None:
        at = time.monotonic()
        exited = ended.si_code == os.CLD_EXITED
        if exited and ended.si_status in CLEAN_CODES:
            orphans.end_loader_workers(processes.children_of(os.getpid()))
        else:
            # Not reaped yet, so its number is still its own: what it left running in its group goes too.
            _kill_tree(ended.si_pid, signal.SIGKILL)
        os.waitpid(ended.si_pid, 0)
        self._pids.discard(ended.si_pid)
        self._send(
            RankEnded(
                pid=ended.si_pid,
                code=ended.si_status if exited else None,
                signal=None if exited else ended.si_status,
                at_monotonic=at,
            )
        )

    def _send(self, message: Ready | RankStarted | RankRefused | RankEnded) -> None:
        with suppress(OSError):  # the launcher is gone: the next turn of the loop sees it and ends the ranks
            self._channel.send(message)


def _wake_only(_number: int, _frame: object) -> None:
    """SIGCHLD needs a Python handler for its byte to reach the wake-up pipe."""


def _kill_tree(pid: int, number: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, number)
            return
        except ProcessLookupError:
            continue  # no group of that number: the child has not reached setsid yet, or all are gone


def _cuda_spoiled() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()
