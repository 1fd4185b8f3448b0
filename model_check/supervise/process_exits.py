"""When and how processes ended, by our own clock, whoever their parent is.

A thread sleeps on one pidfd per process and wakes within a millisecond of an exit. The status of a child of ours is
read without collecting it, so that its owner (torchelastic) still can. Of another launcher's child it is read from
the zombie before its parent collects it, or from the pidfd where the kernel keeps it there (Linux 6.15).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import threading
import time
from collections import deque
from dataclasses import dataclass

from model_check.record import RunDir
from model_check.record.events import read_events
from model_check.record.events.crashes import Exit
from model_check.supervise import processes


@dataclass(frozen=True)
class ProcessExit:
    """How a process ended: a code, a signal, or neither where nobody could tell us."""

    pid: int
    code: int | None
    signal: int | None
    at: float


class _PidfdInfo(ctypes.Structure):
    """struct pidfd_info of linux/pidfd.h, as far as the exit code."""

    _fields_ = [
        ("mask", ctypes.c_uint64),
        ("cgroupid", ctypes.c_uint64),
        ("ids", ctypes.c_uint32 * 11),
        ("exit_code", ctypes.c_int32),
    ]


_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = 0xC0000000 | ctypes.sizeof(_PidfdInfo) << 16 | 0xFF << 8 | 11


def decode_wait_status(status: int) -> tuple[int | None, int | None]:
    """(code, signal) of a status as waitpid(2) encodes it."""
    return (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)


def _status_of_child(fd: int) -> tuple[int | None, int | None] | None:
    try:
        ended = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    return (ended.si_status, None) if ended.si_code == os.CLD_EXITED else (None, ended.si_status)


def _status_from_pidfd(fd: int) -> tuple[int | None, int | None] | None:
    info = _PidfdInfo(mask=_PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(fd, _PIDFD_GET_INFO, info, True)
    except OSError:
        return None
    return decode_wait_status(info.exit_code) if info.mask & _PIDFD_INFO_EXIT else None


def _how_it_ended(pid: int, fd: int) -> tuple[int | None, int | None]:
    found = _status_of_child(fd)
    if found is None:
        stat = processes.read_stat(pid)
        found = decode_wait_status(stat.wait_status) if stat and stat.wait_status is not None else None
    return found or _status_from_pidfd(fd) or (None, None)


def exit_code_recorded(run_dir: RunDir, rank: int, pid: int) -> int | None:
    """The code with which the rank itself said it would leave; a killed one says nothing."""
    events = read_events(run_dir.events(rank))
    return next((e.code for e in reversed(events) if isinstance(e, Exit) and e.pid == pid), None)


class ExitWatcher:
    """Notices the exits of any processes of this host. `woken` is set at each exit, for loops that wait."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self._exits: deque[ProcessExit] = deque()
        self._added: deque[tuple[int, int]] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="model-check-exits", daemon=True)
        self._thread.start()

    def watch(self, pid: int) -> bool:
        """Starts watching; False where there is no such process any more."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return False
        self._added.append((pid, fd))
        os.write(self._wake_write, b"+")
        return True

    def take(self) -> list[ProcessExit]:
        """Exits since the last call, in the order in which they happened."""
        self.woken.clear()
        taken = []
        while self._exits:
            taken.append(self._exits.popleft())
        return taken

    def close(self) -> None:
        self._closing = True
        os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        pids: dict[int, int] = {}
        while not self._closing:
            for fd, _ in poller.poll():
                at = time.monotonic()
                if fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                    while self._added:
                        pid, added = self._added.popleft()
                        pids[added] = pid
                        poller.register(added, select.POLLIN)
                    continue
                code, number = _how_it_ended(pids[fd], fd)
                self._exits.append(ProcessExit(pids.pop(fd), code, number, at))
                poller.unregister(fd)
                os.close(fd)
                self.woken.set()
        for fd in pids:
            os.close(fd)
