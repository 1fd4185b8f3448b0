"""The log files of the ranks: their raw output, one file per rank in /tmp, linked from the run directory.

If /tmp has no room, the files go into the run directory itself: a full disk would make `print` raise in the script. For
the same reason some disk space is reserved ahead of what the ranks write: it belongs to the log whatever else fills the
disk. Beyond its cap a log keeps its first and its newest part; the middle reads as zeros and takes no space. Logs of
jobs long gone are removed: only folders that are certainly ours and that nobody writes to.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from model_check.errors import LaunchError
from model_check.record import RunDir
from model_check.supervise import processes

LOG_ROOT = Path("/tmp")

RESERVED = 4 << 20
KEPT_FIRST = 128 << 20
KEPT_NEWEST = 128 << 20
_KEPT_ON_A_FULL_DISK = 1 << 20
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_MARK = b"\n[model-check] what stood here was dropped to save space; grep -a reads past the gap\n"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LIBC = ctypes.CDLL(None, use_errno=True)
_ROOM_AT_START = 4 * RESERVED

KEPT_DAYS = 7
KEPT_FOLDERS = 20  # beyond these, a day is enough
MOST_FOLDERS = 200  # beyond this count, or the bytes below, an hour is enough
MOST_BYTES = 8 << 30
_DAY_S = 86400.0
_HOUR_S = 3600.0
_NAME = re.compile(r"model_check_logs_(?P<pid>[1-9][0-9]{0,9})_[0-9]{8}-[0-9]{6}(?:-[0-9]{1,4})?")


@dataclass(frozen=True)
class LogDir:
    """The folder of one job's logs. Restarts append to the same files."""

    path: Path

    @classmethod
    def create(cls, run_dir: RunDir, root: Path | None = None) -> LogDir:
        """`/tmp/model_check_logs_<PID>_<timestamp>/`, as private as a new run directory, linked as <run_dir>/logs."""
        link = run_dir.logs
        if link.is_dir() and not link.is_symlink():
            raise LaunchError(
                f"{link} is a folder where the link to the logs belongs",
                remedy="move it away (a copied run keeps its old logs there)",
            )
        root = root or (run_dir.root if not _has_room(LOG_ROOT) and _has_room(run_dir.root) else LOG_ROOT)
        name = f"model_check_logs_{os.getpid()}_{time.strftime('%Y%m%d-%H%M%S')}"
        for number in itertools.count():
            path = root / (f"{name}-{number}" if number else name)
            try:
                # Refuses what is already there: in a shared /tmp it may be somebody's trap.
                path.mkdir(mode=0o700)
                path.chmod(run_dir.mode)  # whatever the umask
                break
            except FileExistsError:
                continue
            except OSError as error:
                raise LaunchError(
                    f"the log folder {path} cannot be made: {error.strerror}", remedy=f"make {root} writable"
                ) from error
        scratch = link.with_name(f".logs.{os.getpid()}-{secrets.token_hex(4)}")
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(path)
        scratch.replace(link)  # another host of the job may be doing this too
        return cls(path)

    def rank(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.log"

    def error_file(self, rank: int, attempt: int) -> Path:
        """Where torch's own @record decorator writes, in scripts that use it."""
        return self.path / f"rank-{rank:05d}.attempt-{attempt}.error.json"


def _has_room(folder: Path) -> bool:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK) and disk.f_bavail * disk.f_frsize >= _ROOM_AT_START


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


@dataclass(frozen=True)
class _OldLogs:
    path: Path
    pid: int
    last_written: float
    size: int


def remove_old_logs(root: Path, now: float | None = None) -> list[Path]:
    """Removes log folders of dead jobs that were last written a week ago, or a day ago beyond the newest twenty.

    Beyond the newest 200 folders, or the newest 8 GiB, an hour ago is enough.
    Only real folders of this user with exactly the name that a job gives them; links are neither followed nor removed.
    """
    moment = time.time() if now is None else now
    newest_first = sorted(_log_folders(root), key=lambda logs: logs.last_written, reverse=True)
    removed = []
    total = 0
    for place, logs in enumerate(newest_first):
        total += logs.size
        kept_s = _DAY_S * (KEPT_DAYS if place < KEPT_FOLDERS else 1)
        if place >= MOST_FOLDERS or (place > 0 and total > MOST_BYTES):
            kept_s = _HOUR_S
        if moment - logs.last_written > kept_s and not processes.is_alive(logs.pid):
            # What cannot be removed (a file of another user in it) stays: tidying must not stop a job.
            shutil.rmtree(logs.path, ignore_errors=True)
            if not os.path.lexists(logs.path):
                removed.append(logs.path)
    return removed


def _log_folders(root: Path) -> list[_OldLogs]:
    """With the time when anything in a folder was last written, and its size in bytes; other users' are left out."""
    found = []
    for folder in root.glob("model_check_logs_*"):
        name = _NAME.fullmatch(folder.name)
        try:
            about = folder.lstat()
            if name and stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
                inside = [file.lstat() for file in folder.iterdir()]
                last_written = max(seen.st_mtime for seen in (about, *inside))
                size = sum(512 * seen.st_blocks for seen in inside)
                found.append(_OldLogs(folder, int(name["pid"]), last_written, size))
        except OSError:
            continue  # removed meanwhile by another job
    return found
