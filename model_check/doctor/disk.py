"""Stage disk: the folders a run writes to: may we, is there room, how fast, and do locks and maps work there."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from model_check.doctor.check import Check, failed, gib, graded, passed
from model_check.doctor.probe import ask
from model_check.doctor.remedies import host_remedy
from model_check.doctor.settings import MIB, Limits, Settings

_WRITTEN = 64 * MIB
_BLOCK = 4 * MIB


def check_disk(settings: Settings) -> Iterator[Check]:
    places, limits = settings.places, settings.limits
    taken = "a checkpoint takes 14 bytes a parameter"
    yield check_room("checkpoint folder", places.checkpoints, limits, "set checkpoint.dir to another disk", taken)
    yield check_write_speed(places.checkpoints, limits)
    yield check_room("data cache folder", places.cache, limits, "set data.cache_dir to another disk")
    yield check_locks(places.cache, settings)
    yield check_maps(places.outputs)
    yield check_room("log folder", places.logs, limits, "remove old logs: those of the ranks go there")


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists: the doctor makes none."""
    folder = folder.expanduser().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_room(name: str, folder: Path, limits: Limits, elsewhere: str, taken: str = "") -> Check:
    """Whether we may write there and how much; `taken` says what the room is needed for."""
    place = existing(folder)
    shown = f"{folder}" if place == folder.expanduser().absolute() else f"{folder} (to be made in {place})"
    if not place.is_dir():
        return failed(name, f"{place} is a file", f"move it away, or {elsewhere}")
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            fix = host_remedy(str(error), f"change its owner, or {elsewhere}")
            return failed(name, f"{shown} cannot be written to: {error.strerror}", fix)
    free = psutil.disk_usage(str(place)).free
    detail = f"{gib(free)} free in {shown}"
    if taken and free < limits.disk_warn:
        detail += f"; {taken}"
    return graded(name, free, detail, f"free space, or {elsewhere}", fail=limits.disk_fail, warn=limits.disk_warn)


def check_write_speed(folder: Path, limits: Limits) -> Check:
    """To the disk itself: the page cache would take anything."""
    name, place = "write speed", existing(folder)
    block = os.urandom(_BLOCK)
    started = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            for _ in range(_WRITTEN // _BLOCK):
                file.write(block)
            os.fsync(file.fileno())
    except OSError as error:
        fix = host_remedy(str(error), "set checkpoint.dir to another disk")
        return failed(name, f"{gib(_WRITTEN)} could not be written to {place}: {error.strerror}", fix)
    rate = _WRITTEN / 1e6 / (time.perf_counter() - started)
    detail = f"{rate:,.0f} MB/s to {place}, synced"
    fix = "set checkpoint.dir to a faster disk, and keep checkpoint.async_save on"
    return graded(name, rate, detail, fix, warn=limits.write_warn_mb_s)


def check_locks(folder: Path, settings: Settings) -> Check:
    """One process builds a cache while the others wait on a lock: another process must see it, and see it go."""
    name, place = "file locks", existing(folder)
    fix = "mount it with locks (NFS: local_lock=none and a lock daemon), or set data.cache_dir to a local disk"
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".model-check-lock-") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = _free_for_another(Path(file.name), settings)
            fcntl.flock(file, fcntl.LOCK_UN)
            released = _free_for_another(Path(file.name), settings)
    except OSError as error:
        return failed(name, f"{place}: {error.strerror}", host_remedy(str(error), fix))
    if "no answer" in held + released:
        return failed(name, f"{place}: a lock took longer than {settings.limits.lock_limit_s:g} s", fix)
    if (held, released) != ("taken", "free"):
        return failed(name, f"{place}: another process finds a held lock {held} and a released one {released}", fix)
    return passed(name, f"a lock in {place} keeps another process out, and lets it in again")


def _free_for_another(path: Path, settings: Settings) -> str:
    answer = ask("try_lock", str(path), limit_s=settings.limits.lock_limit_s, environ=settings.environ)
    if answer.problem:
        return answer.problem
    return "free" if answer.value["free"] else "taken"


def check_maps(folder: Path) -> Check:
    """The black box is a shared map of a file: what one process writes must be there for a reader at once."""
    name, place = "black box", existing(folder)
    fix = "use --run-dir on a local disk: this file system shares no memory maps"
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".model-check-map-") as file:
            # A hole in the file would do for the map, and on a full disk end the first who writes to it (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as shared:
                shared[:4] = b"ring"
                seen = Path(file.name).read_bytes()[:4]
    except (OSError, ValueError) as error:
        return failed(name, f"no memory map in {place}: {error}", host_remedy(str(error), fix))
    if seen != b"ring":
        return failed(name, f"a reader in {place} sees {seen!r} where b'ring' was written", fix)
    return passed(name, f"memory maps in {place} are shared with readers")
