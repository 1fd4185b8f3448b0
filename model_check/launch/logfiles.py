"""The log files of the ranks: their raw output, one file per rank in /tmp, linked from the run directory.

If /tmp has no room, the files go into the run directory itself: a full disk would make `print` raise in the script.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from model_check.errors import LaunchError
from model_check.launch.log_room import RESERVED
from model_check.record import RunDir

LOG_ROOT = Path("/tmp")
_ROOM = 4 * RESERVED


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
    return os.access(folder, os.W_OK) and disk.f_bavail * disk.f_frsize >= _ROOM
