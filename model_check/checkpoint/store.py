"""Checkpoints on disk: each save is a new folder, written aside, checked, and committed by one rename.

<dir>/step_00000010/            a committed checkpoint
    manifest.json               step, world size, every file with its size and checksum
    .metadata, __0_0.distcp …   torch.distributed.checkpoint's own files
<dir>/.staging-step_00000010    a save that was not finished: never read, removed by the next save
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from model_check.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint and what its manifest says."""

    path: Path
    step: int
    manifest: dict[str, Any]


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def checksum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def save(directory: Path, step: int, state: dict[str, Any], extra: dict[str, Any], *, keep: int) -> Path:
    """Saves from all ranks together; `extra` is what JSON can hold (cursor, scale, step). Returns the new folder."""
    target = directory / f"step_{step:08d}"
    staging = directory / f".staging-{target.name}"
    if _is_first():
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    _barrier()
    import torch.distributed.checkpoint as dcp  # DTensor and sympy come with it: a second that many runs do not need

    dcp.save(state, checkpoint_id=staging, no_dist=not dist.is_initialized())
    if _is_first():
        _commit(staging, target, step, extra)
        _retain(directory, keep)
    _barrier()
    return target


def _commit(staging: Path, target: Path, step: int, extra: dict[str, Any]) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "blake2b": checksum(path)}
        for path in sorted(staging.iterdir())
        if path.is_file()
    }
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    manifest = {"format": FORMAT, "step": step, "world_size": world_size, "files": files, "extra": extra}
    with (staging / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    replaced = target.with_name(f".replaced-{target.name}")
    if target.exists():
        target.rename(replaced)
    staging.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def _retain(directory: Path, keep: int) -> None:
    for old in committed(directory)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def committed(directory: Path) -> list[Path]:
    """Committed checkpoints in the order of their commits: another run in the same folder may be at a later step."""
    found = [p for p in directory.glob("step_*") if (p / MANIFEST).is_file()]
    return sorted(found, key=lambda p: ((p / MANIFEST).stat().st_mtime_ns, p.name))


def verify(path: Path) -> Checkpoint:
    """Reads every byte; raises CheckpointError naming the first file that is not what was saved."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, step = manifest["files"], int(manifest["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} has no readable {MANIFEST}", remedy="resume from another checkpoint", code="MC603"
        ) from error
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing", remedy="resume from another checkpoint", code="MC602")
        if file.stat().st_size != expected["bytes"] or checksum(file) != expected["blake2b"]:
            raise CheckpointError(
                f"{file} is not what was saved", remedy="resume from another checkpoint", code="MC601"
            )
    return Checkpoint(path, step, manifest)


def newest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that verifies, and a sentence for each newer one that does not."""
    passed_over: list[str] = []
    for path in reversed(committed(directory)):
        try:
            return verify(path), passed_over
        except CheckpointError as error:
            passed_over.append(str(error))
    return None, passed_over


def load(checkpoint: Checkpoint, state: dict[str, Any]) -> dict[str, Any]:
    """Fills `state` in place and returns the manifest's extra."""
    import torch.distributed.checkpoint as dcp

    dcp.load(state, checkpoint_id=checkpoint.path, no_dist=not dist.is_initialized())
    extra: dict[str, Any] = checkpoint.manifest["extra"]
    return extra
