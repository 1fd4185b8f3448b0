"""Which checkpoint to continue from: the one that was named, or the newest that verifies and fits the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from model_check.checkpoint import layout
from model_check.checkpoint.manifest import MANIFEST, Manifest
from model_check.checkpoint.peers import Peers
from model_check.checkpoint.verify import Checkpoint, verify
from model_check.errors import CheckpointError

Candidate = tuple[Path, CheckpointError | None]
Misfit = Callable[[Manifest], CheckpointError | None]


@dataclass(frozen=True)
class Found:
    """A checkpoint to continue, the lineage to go on saving into (None: a new one), and what to tell the user."""

    checkpoint: Checkpoint | None = None
    lineage: Path | None = None
    notes: list[str] = field(default_factory=list)


def newest(
    directory: Path,
    peers: Peers,
    misfit: Misfit,
    *,
    lineage: Path | None = None,
    is_other_data: Callable[[Manifest], bool] = lambda manifest: False,
    experiment: str | None = None,
) -> Found:
    """The highest step that verifies and fits, in `lineage` (or its origin), or in any lineage of the directory.

    Without `lineage`, model and data decide which lineages may be continued. If there are several, only
    lineages with the same `experiment` count, and a branch that has gone further than the lineage it began from takes
    its place. If several are still left, nothing fits, or a branch has lost its origin, it raises: it never starts over
    unasked.
    """
    notes: list[str] = []
    first_misfit: CheckpointError | None = None
    chosen: Checkpoint | None = None

    def to_try() -> CheckpointError | tuple[list[Candidate], Path | None]:
        if lineage is not None:
            return _of_one_lineage(lineage)
        return _of_all_lineages(directory, misfit, is_other_data, experiment)

    candidates, began_from = peers.decided_by_first(to_try)
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


def named(path: Path, directory: Path, peers: Peers, misfit: Misfit, *, experiment: str | None = None) -> Found:
    """The checkpoint at `path`, or the newest below it. Nothing is passed over in silence: damage raises."""
    if not path.is_dir():
        raise CheckpointError(
            f"there is no checkpoint {path}", remedy="name a step_* folder or a .pt file, or use --resume auto"
        )
    path = path.resolve()
    if not (path / MANIFEST).exists() and layout.lineages(path):
        found = newest(path, peers, misfit, experiment=experiment)
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


def _to_continue(checkpoint: Checkpoint, directory: Path) -> Path | None:
    """Its lineage, where it is the newest of it and lies in our directory; an older one is the start of a branch."""
    lineage = checkpoint.path.parent
    is_newest = layout.committed(lineage)[-1:] == [checkpoint.path]
    return lineage if is_newest and lineage.parent == directory.resolve() else None


def _of_one_lineage(lineage: Path) -> tuple[list[Candidate], Path | None]:
    began_from = layout.origin(lineage)
    found = _highest_step_first(lineage)
    return ([*found, (began_from, None)] if began_from is not None else found), began_from


def _of_all_lineages(
    directory: Path, misfit: Misfit, is_other_data: Callable[[Manifest], bool], experiment: str | None
) -> CheckpointError | tuple[list[Candidate], None]:
    """Skipped candidates first, then candidates to continue from; an error if the user must choose."""
    ours: list[tuple[Path, Checkpoint]] = []
    others: list[Checkpoint] = []
    passed_over: list[Candidate] = []
    for lineage in layout.lineages(directory):
        head = _head(lineage)
        if head is None:
            passed_over += _highest_step_first(lineage)
        elif misfit(head.manifest) is not None:
            passed_over.append((head.path, None))
        elif is_other_data(head.manifest):
            others.append(head)
        else:
            ours.append((lineage, head))
    if others and not ours:
        return _choice("only checkpoints of this model that were trained on other data are there", others, "MC609")
    same = [(lineage, head) for lineage, head in ours if head.manifest.extra.get("experiment") == experiment]
    if len(ours) > 1 and not same:
        return _choice("several trainings of this model on this data are there", [head for _, head in ours], "MC610")
    ours = same if len(ours) > 1 else ours
    leading = [(lineage, head) for lineage, head in ours if not _is_overtaken(lineage, head, ours)]
    if len(leading) > 1:
        what = "several trainings with these settings are there, and none of them continues all the others"
        return _choice(what, [head for _, head in leading], "MC610")
    # The leading lineage descends from all the others. They are tried after it, in case it is damaged.
    furthest_first = sorted(ours, key=lambda entry: entry[1].step, reverse=True)
    return passed_over + [found for lineage, _ in furthest_first for found in _highest_step_first(lineage)], None


def _is_overtaken(lineage: Path, head: Checkpoint, all_of_them: list[tuple[Path, Checkpoint]]) -> bool:
    """Whether a descendant of this lineage has gone further, by steps: wall-clock time may be set back."""
    return any(
        other_head.step > head.step and lineage.resolve() in layout.ancestors(other)
        for other, other_head in all_of_them
    )


def _choice(what: str, heads: list[Checkpoint], code: str) -> CheckpointError:
    choices = "".join(
        f"\n  --resume {head.path}   (saved {time.strftime('%Y-%m-%d %H:%M', time.localtime(head.manifest.saved_at))})"
        for head in heads
    )
    return CheckpointError(
        f"--resume auto cannot tell which training to continue: {what}",
        remedy=f"name one, or leave out --resume to start afresh:{choices}",
        code=code,
    )


def _head(lineage: Path) -> Checkpoint | None:
    """The highest step whose manifest can be read."""
    for path in reversed(layout.committed(lineage)):
        try:
            return Checkpoint(path.resolve(), Manifest.read(path))
        except CheckpointError:
            continue
    return None


def _highest_step_first(lineage: Path) -> list[Candidate]:
    """Not ordered by wall-clock time, which may be set back. Unfinished checkpoints come with their fault."""
    found: list[Candidate] = [(path.resolve(), None) for path in layout.committed(lineage)]
    for path in layout.unfinished(lineage):
        unfinished = CheckpointError(
            f"{path} was never finished", remedy="nothing: it is removed when its run is gone", code="MC603"
        )
        found.append((path.resolve(), unfinished))
    return sorted(found, key=lambda candidate: layout.step_of(candidate[0]), reverse=True)


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
