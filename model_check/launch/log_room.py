"""Disk space for the ranks' logs: reserves some ahead of what they write, and drops the middle of a long log.

A rank writes straight into its log, so a disk that others have filled would make `print` raise in the user's script.
The reserved blocks belong to the log whatever else fills the disk. Beyond its cap a log keeps its first and its newest
part; the middle reads as zeros and takes no space.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

RESERVED = 4 << 20
KEPT_FIRST = 128 << 20
KEPT_NEWEST = 128 << 20
_KEPT_ON_A_FULL_DISK = 1 << 20
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_MARK = b"\n[model-check] what stood here was dropped to save space; grep -a reads past the gap\n"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LIBC = ctypes.CDLL(None, use_errno=True)


class LogRoom:
    """Manages space for one job's logs. Does nothing on a filesystem that cannot reserve or release blocks."""

    def __init__(self, *, kept_first: int = KEPT_FIRST, kept_newest: int = KEPT_NEWEST) -> None:
        self._kept_first = kept_first
        self._kept_newest = kept_newest
        self._open: dict[Path, int] = {}
        self._reserved: dict[Path, int] = {}  # up to which byte of the file
        self._given_up: dict[Path, int] = {}

    def look(self, logs: Iterable[Path]) -> OSError | None:
        """Makes room in each log. Returns the error if the disk is full."""
        full: OSError | None = None
        for log in logs:
            try:
                self._look_at(log)
            except OSError as error:
                full = error if error.errno in _NO_ROOM else full
        return full

    def close(self) -> None:
        """Releases reserved blocks that were not used."""
        for descriptor in self._open.values():
            with suppress(OSError):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)
        self._open.clear()

    def _look_at(self, log: Path) -> None:
        if log not in self._open:
            self._open[log] = os.open(log, os.O_RDWR | os.O_CLOEXEC)
        descriptor = self._open[log]
        size = os.fstat(descriptor).st_size
        if size - self._given_up.get(log, 0) > self._kept_first + 2 * self._kept_newest:
            self._give_up(log, self._kept_first, size - self._kept_newest)
        left = self._reserved.get(log, 0) - size
        if left >= RESERVED // 2:
            return
        try:
            _fallocate(descriptor, _KEEP_SIZE, size, RESERVED)
        except OSError as error:
            if error.errno in _NO_ROOM:
                if left >= RESERVED // 8:
                    raise  # what is reserved lasts: the disk may have room again by then
                self._give_up(log, _KEPT_ON_A_FULL_DISK, size - _KEPT_ON_A_FULL_DISK)
                _fallocate(descriptor, _KEEP_SIZE, size, RESERVED)
            else:
                self._reserved[log] = 1 << 62  # this filesystem cannot reserve: do not try again
                return
        self._reserved[log] = size + RESERVED

    def _give_up(self, log: Path, first: int, last: int) -> None:
        begin = max(first, self._given_up.get(log, 0))
        if last > begin:
            _fallocate(self._open[log], _PUNCH_HOLE | _KEEP_SIZE, begin, last - begin)
            self._given_up[log] = last
            os.pwrite(self._open[log], _MARK, begin)


def _fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    if not hasattr(_LIBC, "fallocate64"):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    if _LIBC.fallocate64(descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(length)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
