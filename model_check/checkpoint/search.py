"""Which checkpoint to continue from: the one that was named, or the newest that verifies and fits the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from model_check.checkpoint import layout
from model_check.checkpoint.manifest import MANIFEST, Manifest
from model_check.checkpoint.peers import Peers
from model_check.checkpoint.verify import Checkpoint, verify
from model_check.errors import CheckpointError

Misfit = Callable[[Manifest], CheckpointError | None]


@dataclass(frozen=True)
class Found:
    """A checkpoint to continue, the lineage to go on saving into (None: a new one), and what to tell the user."""

    checkpoint: Checkpoint | None = None
    lineage: Path | None = None
    notes: list[str] = field(default_factory=list)


def newest(directory: Path, peers: Peers, misfit: Misfit, *, lineage: Path | None = None) -> Found:
    """The newest checkpoint in the directory (or in one lineage of it, or what that began from) that verifies and fits.

    Where there are whole checkpoints and none of them fits the model, or a branch has lost what it began from, it
    raises rather than starting over unasked.
    """
    notes: list[str] = []
    first_misfit: CheckpointError | None = None
    chosen: Checkpoint | None = None
    candidates, began_from = peers.from_first(_candidates(directory, lineage) if peers.is_first else None)
    for path, fault in candidates:
        try:
            if fault is not None:
                raise fault
            wrong = misfit(Manifest.read(path))
            if wrong is not None:
                first_misfit = first_misfit or wrong
                raise wrong
            chosen = verify_together(path, peers)
            break
        except CheckpointError as error:
            notes.append(f"passed over {path.name}: {error}")
    if chosen is None and first_misfit is not None:
        raise first_misfit
    if chosen is None and began_from is not None:
        raise CheckpointError(
            f"nothing in {lineage} can be continued, nor what it began from ({'; '.join(notes)})",
            remedy=f"name another checkpoint than {began_from} with --resume",
            code="MC603",
        )
    if chosen is None:
        notes.append(f"no checkpoint in {lineage or directory}: starting fresh")
        return Found(notes=notes)
    return Found(chosen, lineage or chosen.path.parent, notes)


def named(path: Path, directory: Path, peers: Peers, misfit: Misfit) -> Found:
    """The checkpoint at `path`, or the newest below it. Nothing is passed over in silence: damage raises."""
    if not path.is_dir():
        raise CheckpointError(
            f"there is no checkpoint {path}", remedy="name a step_* folder or a .pt file, or use --resume auto"
        )
    path = path.resolve()
    if not (path / MANIFEST).exists() and layout.lineages(path):
        found = newest(path, peers, misfit)
        if found.checkpoint is None:
            raise CheckpointError(
                f"no checkpoint in {path} is whole ({'; '.join(found.notes[:-1])})",
                remedy="name another one, or use --resume auto, which starts fresh where there is none",
                code="MC603",
            )
        return Found(found.checkpoint, _to_continue(found.checkpoint, directory), found.notes)
    wrong = misfit(Manifest.read(path))
    if wrong is not None:
        raise wrong
    checkpoint = verify_together(path, peers)
    return Found(checkpoint, _to_continue(checkpoint, directory))


def _to_continue(checkpoint: Checkpoint | None, directory: Path) -> Path | None:
    """Its lineage, where it is the newest of it and lies in our directory; an older one is the start of a branch."""
    if checkpoint is None:
        return None
    lineage = checkpoint.path.parent
    is_newest = layout.committed(lineage)[-1:] == [checkpoint.path]
    return lineage if is_newest and lineage.parent == directory.resolve() else None


def _candidates(directory: Path, lineage: Path | None) -> tuple[list[tuple[Path, CheckpointError | None]], Path | None]:
    """Newest first, with the fault of those that need no reading to be ruled out; and what the lineage began from."""
    dated: list[tuple[float, Path, CheckpointError | None]] = []
    for folder in [lineage] if lineage is not None else layout.lineages(directory):
        for path in layout.unfinished(folder):
            unfinished = CheckpointError(
                f"{path} was never finished", remedy="nothing: it is removed when its run is gone", code="MC603"
            )
            dated += [(changed, path, unfinished) for changed in _changed_at(path)]
        for path in layout.committed(folder):
            try:
                dated.append((Manifest.read(path).saved_at, path, None))
            except CheckpointError as error:
                dated += [(changed, path, error) for changed in _changed_at(path)]
    found = [(path.resolve(), fault) for _, path, fault in sorted(dated, key=lambda entry: entry[0], reverse=True)]
    began_from = layout.origin(lineage) if lineage is not None else None
    return ([*found, (began_from, None)] if began_from is not None else found), began_from


def _changed_at(path: Path) -> list[float]:
    """When a folder was last changed; nothing where it is gone, since another run commits and tidies up meanwhile."""
    try:
        return [path.stat().st_mtime]
    except FileNotFoundError:
        return []


def verify_together(path: Path, peers: Peers) -> Checkpoint:
    """Every rank reads its share of the bytes; damage that one of them finds raises on all."""
    error: CheckpointError | None = None
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = verify(path, part=peers.rank, parts=peers.world_size)
    except CheckpointError as found:
        error = found
    for other in peers.gather(error):
        if other is not None:
            raise other
    assert checkpoint is not None, f"{path} verified on no rank and failed on none"
    return checkpoint
