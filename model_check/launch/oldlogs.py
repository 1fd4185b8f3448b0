"""Removes the raw logs of jobs long gone from /tmp: only folders that are certainly ours and that nobody writes to."""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from model_check.supervise import processes

KEPT_DAYS = 7
KEPT_FOLDERS = 20  # beyond these, a day is enough
MOST_FOLDERS = 200  # beyond this count, or the bytes below, an hour is enough
MOST_BYTES = 8 << 30
_DAY_S = 86400.0
_HOUR_S = 3600.0
_NAME = re.compile(r"model_check_logs_(?P<pid>[1-9][0-9]{0,9})_[0-9]{8}-[0-9]{6}(?:-[0-9]{1,4})?")


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
    found = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                name = _NAME.fullmatch(entry.name)
                about = _last_written(entry) if name else None
                if name and about is not None:
                    found.append(_OldLogs(Path(entry.path), int(name["pid"]), *about))
    except OSError:
        return []  # the root itself cannot be read: then the job's own log folder will say so
    return found


def _last_written(folder: os.DirEntry[str]) -> tuple[float, int] | None:
    """When anything in the folder was last written, and its size in bytes; None for another user's folder."""
    try:
        about = folder.stat(follow_symlinks=False)
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            return None
        with os.scandir(folder.path) as files:
            inside = [file.stat(follow_symlinks=False) for file in files]
        return max(seen.st_mtime for seen in (about, *inside)), sum(512 * seen.st_blocks for seen in inside)
    except OSError:
        return None  # removed meanwhile by another job
