"""Where checkpoints lie. Every line of training that was ever continued has a folder of its own.

.checkpoints/
    latest -> 20260101-120000-4711/step_00000019         the newest of all
    20260101-120000-4711/                                a lineage: a run and the runs that continue it
        step_00000009/  step_00000019/                   committed checkpoints, whole by construction
        latest -> step_00000019
        continues                                        of a branch: the checkpoint that it began from
        writer.lock                                      locked by the run that saves here
        .staging-step_00000029@host.4711-98765           a save under way, or one whose run died: never read

A fresh run opens a new lineage, named after its run directory, so two runs never write over each other. A run that
continues the newest checkpoint of a lineage stays in it; one that continues an older one branches off into its own,
and so does one that finds another run at work there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import IO

from model_check.checkpoint.manifest import MANIFEST
from model_check.record.process_identity import place, start_ticks

LATEST = "latest"
CONTINUES = "continues"
WRITER = "writer.lock"
_STEP = re.compile(r"step_(\d+)")
_COMMITTED = re.compile(r"step_(\d{8,})")
_ASIDE = re.compile(r"\.(?:staging|replaced|discarded)-.+@(?P<owner>[^@]+)")
# Earlier versions named neither the place nor the start.
_OWNER = re.compile(r"(?P<host>[^~]*)(?:~(?P<place>[0-9a-f]+))?\.(?P<pid>\d+)(?:-(?P<start>\d+))?")


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint, finished or not."""
    match = _STEP.search(checkpoint.name)
    return int(match[1]) if match else -1


def owner() -> str:
    """Names this process, and where its PID counts. A later run sees from it whether the process still runs."""
    return f"{socket.gethostname()}~{place()}.{os.getpid()}-{start_ticks(os.getpid())}"


def owner_lives(owner: str) -> bool | None:
    """Whether the process that `owner()` named still runs; None where its PID means nothing here.

    That is on another host, and in another container, though its host name may be the same.
    """
    match = _OWNER.fullmatch(owner)
    if match is None or match["host"] != socket.gethostname() or match["place"] not in (None, place()):
        return None
    started = start_ticks(int(match["pid"]))
    return started is not None and match["start"] in (None, str(started))


def staging_folder(lineage: Path, step: int, whose: str) -> Path:
    return lineage / f".staging-{folder_name(step)}@{whose}"


def committed(lineage: Path) -> list[Path]:
    """Committed checkpoints of a lineage, oldest step first."""
    found = [(int(match[1]), path) for path in _children(lineage) if (match := _COMMITTED.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / MANIFEST).exists()]


def unfinished(lineage: Path) -> list[Path]:
    """Saves that will never be committed, as far as can be seen from here, and step folders without a manifest."""
    return [
        path
        for path in _children(lineage)
        if (path.name.startswith(".staging-") and not _is_owned_here(path))
        or (_COMMITTED.fullmatch(path.name) and not (path / MANIFEST).exists())
    ]


def holds_any(folder: Path) -> bool:
    """Whether the folder is a checkpoint, or there are some in it or in a lineage below, whole or not."""
    return (folder / MANIFEST).exists() or was_meant_as_one(folder) or bool(lineages(folder))


def was_meant_as_one(folder: Path) -> bool:
    """Whether a folder without a manifest is what is left of a checkpoint, and not something else."""
    return bool(_COMMITTED.fullmatch(folder.resolve().name)) or any(folder.glob("rank_*.bin"))


def _is_owned_here(path: Path) -> bool:
    """Whether the process that works on it runs on this host."""
    match = _ASIDE.fullmatch(path.name)
    return bool(match and owner_lives(match["owner"]))


def lineages(directory: Path) -> list[Path]:
    """The folders of a checkpoint directory that hold checkpoints; the directory itself, where it holds some."""
    folders = [path for path in _children(directory) if not path.name.startswith(".") and not path.is_symlink()]
    return [path for path in (directory, *folders) if committed(path) or unfinished(path)]


def open_lineage(directory: Path, wanted: str) -> Path:
    """A new folder of this name, or with a number behind it where the name is taken."""
    directory.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = directory / (wanted if number == 1 else f"{wanted}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def claim(lineage: Path) -> IO[str] | None:
    """Makes this process the one that saves here, as long as what is returned is open; None: another process is.

    Where the file system has no locks nothing is known of others, and it is claimed without one.
    """
    file = (lineage / WRITER).open("a")
    try:
        # Not flock: that would also part two savers of one process, of which the first is done.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            file.close()
            return None
    return file


def remember_origin(lineage: Path, checkpoint: Path) -> None:
    """A branch that has saved nothing yet still knows what it goes on from."""
    # Of the real folder: `..` behind a link leads to the parent of what it points to.
    path = os.path.relpath(checkpoint.resolve(), lineage.resolve())
    (lineage / CONTINUES).write_bytes(os.fsencode(path) + b"\n")


def origin(lineage: Path) -> Path | None:
    """The checkpoint that this lineage began from, there or not; None where it began afresh."""
    try:
        path = os.fsdecode((lineage / CONTINUES).read_bytes().rstrip(b"\n\0"))  # zeros: a power cut
    except FileNotFoundError:
        return None
    return (lineage.resolve() / path).resolve()


def ancestors(lineage: Path) -> list[Path]:
    """The lineages that this one descends from, as resolved paths, nearest first. Some may have been deleted."""
    found: list[Path] = []
    while (began_from := origin(lineage)) is not None and began_from.parent not in found:
        lineage = began_from.parent
        found.append(lineage)
    return found


def commit(staging: Path, target: Path) -> None:
    """One rename makes it a checkpoint. An older one of the same step, which was passed over, moves out of its way."""
    if target.exists():
        discard(target, "replaced")
    staging.rename(target)
    _sync_folder(target.parent)
    point_latest(target.parent, target)
    point_latest(target.parent.parent, target)


def point_latest(folder: Path, target: Path) -> None:
    """`latest` is replaced by a rename: it names the old checkpoint or the new one."""
    scratch = folder / f".{LATEST}.{os.getpid()}"
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(os.path.relpath(target, folder))
    scratch.replace(folder / LATEST)


def surplus(
    lineage: Path, saved: Path, counts: Container[int], *, last: int, every: int, best: int | None
) -> list[Path]:
    """Checkpoints to remove: older than the last N sound ones, not a K-th step, not the best, not the one just saved.

    counts: steps with a sound checkpoint. Others do not count towards the last N, and stay if they lie among them.
    """
    found = {step_of(path): path for path in committed(lineage)}
    newest = [step for step in found if step in counts][-last:]
    return [
        path
        for step, path in found.items()
        if newest
        and step < newest[0]
        and path != saved
        and step != best
        and not (every and (step + 1) % every == 0)
        and not _is_needed_by_a_branch(path)
    ]


def _is_needed_by_a_branch(checkpoint: Path) -> bool:
    """Whether a sibling lineage started from this checkpoint and has saved nothing yet."""
    branches = [path for path in _children(checkpoint.parent.parent) if (path / CONTINUES).exists()]
    return any(origin(path) == checkpoint.resolve() and not committed(path) for path in branches)


def remove_leftovers(lineage: Path, *, whose: str) -> list[Path]:
    """Removes saves whose process is gone, here or in a lineage beside; those of other hosts are left alone.

    `whose` is the caller, who has no save under way.
    """
    removed = []
    for folder in [lineage, *_children(lineage.parent)]:
        for path in _children(folder):
            match = _ASIDE.fullmatch(path.name)
            if match and (match["owner"] == whose or owner_lives(match["owner"]) is False):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def best_step(losses: Mapping[int, float]) -> int | None:
    """The step with the lowest validation loss; of equals the later one."""
    return min(losses, key=lambda step: (losses[step], -step)) if losses else None


def discard(path: Path, why: str) -> None:
    """Renamed first: a kill during the removal must not leave half a checkpoint under a committed name."""
    aside = path.with_name(f".{why}-{path.name}@{owner()}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _children(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
