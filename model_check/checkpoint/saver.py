"""Saving while training goes on: copy, write, agree, commit.

prepare()     before the first save: memory for the copies is made beside training
save()        training waits: the plan, and the copy of this rank's share
hold_update() before each optimizer step: the device finishes a copy that is still under way
a thread      writes the share, tells the other ranks how that went; rank 0 commits when all of them wrote well
poll()        brings the outcome back to the training thread: a save that failed is always reported
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from model_check.checkpoint import layout
from model_check.checkpoint.layout import step_of
from model_check.checkpoint.manifest import Manifest, TensorEntry
from model_check.checkpoint.parts import Part, Written, write_parts
from model_check.checkpoint.peers import Peers
from model_check.checkpoint.search import verify_together
from model_check.checkpoint.shards import collect_parts
from model_check.checkpoint.staging import Limits, Staged, Staging
from model_check.checkpoint.verify import check_sizes
from model_check.errors import CheckpointError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# The manifest, and what a file system needs to keep a file.
_ROOM_BESIDES_TENSORS = 1 << 16
# More than this many writers only wait for each other at the disk.
_MOST_WRITERS = 4


Fault = tuple[int, str]  # errno and text of an OSError; for any other failure, 0 and its text


@dataclass(frozen=True)
class Retention:
    """What is kept: the last N, every step whose number (from 1) is a multiple of K, the lowest validation loss."""

    last: int = 3
    every: int = 0
    best: bool = True


@dataclass(frozen=True)
class Saved:
    """How a save ended; the same on every rank. `error` is None where `path` is a committed checkpoint."""

    step: int
    path: Path
    bytes: int
    seconds: float
    error: CheckpointError | None
    note: str = ""


class Saver:
    """Saves of one run into one lineage. Making one is collective, and so is every `save`."""

    def __init__(
        self,
        directory: Path,
        peers: Peers,
        *,
        lineage: Path | None = None,
        origin: Path | None = None,
        name: str,
        background: bool = True,
        retention: Retention | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Continues `lineage`; without one, opens a new lineage called `name` in the directory.

        origin: the checkpoint that training goes on from. Where another run saves into `lineage`, a new one is opened
        and `shared` is the lineage that was wanted.
        """
        self._peers = peers
        self._background = background
        self._retention = retention or Retention()
        self._staging = Staging(limits)
        self._staged: Staged | None = None
        self._writers = max(1, min(_MOST_WRITERS, len(os.sched_getaffinity(0)) // peers.ranks_on_host))
        self._thread: threading.Thread | None = None
        self._saved: list[Saved] = []
        self._claim: IO[str] | None = None
        self.lineage, self._owner = peers.decided_by_first(lambda: self._open_folder(directory, lineage, origin, name))
        self._origin = origin.resolve() if origin is not None else None
        # Training continues from an earlier checkpoint, so these were found to be damaged.
        self._damaged = {path for path in layout.committed(self.lineage) if self._is_after_origin(path)}
        self.shared = lineage if lineage is not None and self.lineage != lineage else None

    def _open_folder(
        self, directory: Path, lineage: Path | None, origin: Path | None, name: str
    ) -> tuple[Path, str] | CheckpointError:
        """The lineage to save into, claimed and tidy, and who claimed it. Rank 0 only."""
        try:
            folder = lineage
            self._claim = layout.claim(lineage) if lineage is not None else None
            if folder is None or self._claim is None:
                folder = layout.open_lineage(directory, name)
                self._claim = layout.claim(folder)
                if origin is not None:
                    layout.remember_origin(folder, origin)
            layout.remove_leftovers(folder, whose=layout.owner())
            return folder, layout.owner()
        except OSError as error:
            return CheckpointError(
                f"checkpoints cannot be written to {directory}: {error.strerror}",
                remedy="set checkpoint.dir to a folder you may write to",
                code="MC608",
            )

    def _is_after_origin(self, path: Path) -> bool:
        origin = self._origin
        return origin is not None and path.parent.resolve() == origin.parent and step_of(path) > step_of(origin)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Makes memory for background saves of such a state, beside training. Collective; does nothing on the CPU."""
        if self._background:
            parts = collect_parts(dict(state), self._peers.group)
            self._staging.prepare(parts, ranks_on_host=self._peers.ranks_on_host)

    def save(self, step: int, state: Mapping[str, Any], extra: Mapping[str, Any], *, wait: bool = False) -> float:
        """Saves `state` (name to tensor); returns the seconds that the host waited. `wait`: until it is committed."""
        began = time.perf_counter()
        self.wait()
        parts = collect_parts(dict(state), self._peers.group)
        staged = self._staged = self._stage(parts, waits=wait or not self._background)
        if staged.is_copy:
            # A daemon: a rank that fails must end at once, whatever its unfinished save is waiting for.
            self._thread = threading.Thread(
                target=self._finish, args=(step, staged, dict(extra), began), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._finish(step, staged, dict(extra), began)
        return time.perf_counter() - began

    def _stage(self, parts: Sequence[Part], *, waits: bool) -> Staged:
        if waits:
            return self._staging.live(parts)
        try:
            return self._staging.copy(parts)
        except (RuntimeError, MemoryError) as error:
            staged = self._staging.live(parts)
            share = sum(part.nbytes for part in parts)
            staged.note = f"no host memory for a copy of {share:,} bytes ({error}): training waits for this save"
            return staged

    def hold_update(self) -> None:
        """What the device is given next comes after the copy of the save under way; the host does not wait."""
        if self._staged is not None:
            self._staged.hold_update()

    def device_wait_s(self) -> float | None:
        """How long the device stood still for the last save, said once, as soon as it is known."""
        waited = self._staged.device_wait_s() if self._staged is not None else None
        if waited is not None:
            self._staged = None
        return waited

    def poll(self) -> list[Saved]:
        """The saves that ended since the last call."""
        ended, self._saved = self._saved, []
        return ended

    @property
    def is_preparing(self) -> bool:
        """Memory for the copies is still being made; a save before that waits for it."""
        return self._staging.is_preparing

    @property
    def is_saving(self) -> bool:
        """A save is being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until no save is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Waits for the save under way and leaves the lineage to others; for a process that goes on without it."""
        self.wait()
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def _finish(self, step: int, staged: Staged, extra: dict[str, Any], began: float) -> None:
        target = self.lineage / layout.folder_name(step)
        needed = sum(part.nbytes for part in staged.parts)
        error: CheckpointError | None = None
        try:
            staged.settle()
            error, needed = self._write_and_commit(step, staged.parts, extra, target)
        except Exception as failure:
            # A peer that died in the middle ends the job too; the outcome says that this save does not exist.
            error = CheckpointError(f"the save of step {step} was cut short ({failure})", code="MC608")
        finally:
            staged.release()
        self._saved.append(Saved(step, target, needed, time.perf_counter() - began, error, staged.note))

    def _write_and_commit(
        self, step: int, parts: Sequence[Part], extra: dict[str, Any], target: Path
    ) -> tuple[CheckpointError | None, int]:
        """Every rank comes out of here with the same answer."""
        staging = layout.staging_folder(self.lineage, step, self._owner)
        room: list[int] = []

        def look_around() -> None:
            if self._peers.is_first:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
            room.append(free_bytes(self.lineage))

        fault = self._attempt(look_around)
        everybody = self._peers.gather((fault, sum(part.nbytes for part in parts), sum(room)))
        needed = sum(share for _, share, _ in everybody)
        free = min(space for _, _, space in everybody)
        fault = next((fault for fault, _, _ in everybody if fault is not None), None)
        if fault is None and needed + _ROOM_BESIDES_TENSORS > free:
            fault = (errno.ENOSPC, "not enough room")
        if fault is None:
            written: list[Written] = []
            file = staging / f"rank_{self._peers.rank:05d}.bin"

            def write() -> None:
                written.extend(write_parts(file, parts, threads=self._writers))

            fault = self._attempt(write) if parts else None
            reports = self._peers.gather((fault, written))
            fault = next((fault for fault, _ in reports if fault is not None), None)
            if fault is None and self._peers.is_first:
                everything = [entry for _, entries in reports for entry in entries]
                fault = self._attempt(lambda: self._commit(staging, target, step, everything, extra))
            fault = self._peers.from_first(fault)
            untidy: Fault | None = None
            if fault is None:
                fault, untidy = self._discard_surplus(target)
            if untidy is not None:
                return _untidy_error(self.lineage, untidy), needed
        if fault is None:
            return None, needed
        if self._peers.is_first:
            shutil.rmtree(staging, ignore_errors=True)
        return _save_error(step, self.lineage, fault, needed, free), needed

    @staticmethod
    def _attempt(work: Any) -> Fault | None:
        """The error number and text of a failure of `work`: plain data, for peers that would wait for ever untold."""
        try:
            work()
        except OSError as error:
            return error.errno or 0, error.strerror or str(error)
        except Exception as error:
            return 0, f"{type(error).__name__}: {error}"
        return None

    def _commit(
        self, staging: Path, target: Path, step: int, written: Sequence[Written], extra: dict[str, Any]
    ) -> None:
        files: dict[str, int] = {}
        tensors: dict[str, TensorEntry] = {}
        for entry in sorted(written, key=lambda w: (w.name, w.chunk.offsets)):
            files[entry.chunk.file] = files.get(entry.chunk.file, 0) + entry.chunk.bytes
            before = tensors[entry.name].chunks if entry.name in tensors else ()
            tensors[entry.name] = TensorEntry(entry.dtype, entry.shape, (*before, entry.chunk))
        for name, size in files.items():
            found = (staging / name).stat().st_size
            if found != size:
                raise OSError(errno.EIO, f"{name} has {found} bytes on disk instead of {size}")
        Manifest(step, self._peers.world_size, time.time(), files, tensors, extra).write(staging)
        layout.commit(staging, target)
        self._damaged.discard(target)

    def _discard_surplus(self, saved: Path) -> tuple[Fault | None, Fault | None]:
        """Returns a fault in the new checkpoint and a fault in the removal. Collective.

        The checkpoint training resumed from is removed only after every rank has read back its part of the new one.
        """
        surplus: list[Path] = []
        untidy = self._attempt(lambda: surplus.extend(self._surplus(saved))) if self._peers.is_first else None
        if self._peers.from_first(any(path.resolve() == self._origin for path in surplus)):
            try:
                verify_together(saved, self._peers)
            except CheckpointError as error:
                self._damaged.add(saved)
                return (errno.EIO, error.message), None
            self._origin = None
        for path in surplus:
            untidy = untidy or self._attempt(partial(layout.discard, path, "discarded"))
        return None, self._peers.from_first(untidy)

    def _surplus(self, saved: Path) -> list[Path]:
        sound: set[int] = set()
        losses = {}
        for path in layout.committed(self.lineage):
            try:
                manifest = check_sizes(path)
            except CheckpointError:
                continue  # the search for a checkpoint reports it
            # A later step was skipped when training went back to an earlier one.
            if path in self._damaged or manifest.step > step_of(saved):
                continue
            sound.add(manifest.step)
            loss = manifest.extra.get("val_loss")
            if isinstance(loss, (int, float)) and math.isfinite(loss):  # NaN compares as not less than any loss
                losses[manifest.step] = float(loss)
        keep = self._retention
        best = layout.best_step(losses) if keep.best else None
        return layout.surplus(self.lineage, saved, sound, last=keep.last, every=keep.every, best=best)


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder. One that somebody removed is about to be made again: its parent knows as much."""
    while True:
        try:
            return shutil.disk_usage(folder).free
        except FileNotFoundError:
            if folder == folder.parent:
                raise
            folder = folder.absolute().parent


class UntidyError(CheckpointError):
    """The new checkpoint is whole; older ones could not be removed."""


def _untidy_error(folder: Path, fault: Fault) -> CheckpointError:
    return UntidyError(
        f"old checkpoints in {folder} could not be removed: {fault[1]}",
        remedy="remove them by hand before the disk is full; the new one is whole",
        code="MC608",
    )


def _save_error(step: int, folder: Path, fault: Fault, needed: int, free: int) -> CheckpointError:
    number, text = fault
    older = "; older checkpoints are intact" if layout.committed(folder) else "; there is no older checkpoint"
    if number in _NO_ROOM:
        return CheckpointError(
            f"the checkpoint of step {step} needs {needed:,} bytes, {free:,} are free in {folder} ({text})",
            remedy=f"free space, lower checkpoint.keep, or set checkpoint.dir to another disk{older}",
            code="MC604",
        )
    return CheckpointError(
        f"the checkpoint of step {step} could not be written to {folder}: {text}",
        remedy=f"check the disk, or set checkpoint.dir to another one{older}",
        code="MC608",
    )
