"""`--resume`: the newest that verifies and fits, or the one that was named; the rest is passed over aloud."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from checkpoint_making import Lineage

from model_check.checkpoint import search
from model_check.checkpoint.manifest import Manifest
from model_check.checkpoint.peers import Peers
from model_check.errors import CheckpointError


def fits(manifest: Manifest) -> CheckpointError | None:
    return None


def newest(directory: Path, misfit: search.Misfit = fits, **options: Path) -> search.Found:
    return search.newest(directory, Peers(), misfit, **options)


def damage(path: Path) -> None:
    shard = path / "rank_00000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 4
    shard.write_bytes(content)


def test_nothing_to_resume_starts_fresh_and_says_so(tmp_path: Path) -> None:
    found = newest(tmp_path / "none")
    assert found.checkpoint is None and found.lineage is None
    assert found.notes == [f"no checkpoint in {tmp_path / 'none'}: starting fresh"]


def test_damaged_and_partial_ones_are_passed_over_with_their_codes(lineage: Lineage) -> None:
    directory = lineage.folder.parent
    paths = {step: lineage.save(step).path for step in (1, 2, 3, 4)}
    damage(paths[4])
    (paths[3] / "rank_00000.bin").unlink()
    (lineage.folder / ".staging-step_00000009@host.1").mkdir()
    found = newest(directory)
    assert found.checkpoint is not None and found.checkpoint.step == 2
    assert found.lineage == lineage.folder.resolve()
    assert [note.split(":")[0] for note in found.notes] == [
        "passed over .staging-step_00000009@host.1",
        "passed over step_00000004",
        "passed over step_00000003",
    ]
    assert ["MC603" in found.notes[0], "MC601" in found.notes[1], "MC602" in found.notes[2]] == [True] * 3


# Lineages of one experiment as name: (what it began from, its steps), and the heads to choose from.
FAMILIES = {
    "a branch that went further": ({"a": (None, [1, 3]), "e": ("a/1", [3, 5])}, ["e/5"]),
    "a branch of a branch": ({"a": (None, [1]), "b": ("a/1", [4]), "c": ("b/4", [6])}, ["c/6"]),
    "a branch of the newest": ({"b": (None, [3]), "a": ("b/3", [5])}, ["a/5"]),
    "a trunk that went on past its branch": ({"a": (None, [1, 9]), "e": ("a/1", [5])}, ["a/9", "e/5"]),
    "a trunk and a branch at the same step": ({"a": (None, [1, 5]), "e": ("a/1", [5])}, ["a/5", "e/5"]),
    "two branches": ({"a": (None, [1, 3]), "e": ("a/1", [5]), "f": ("a/3", [7])}, ["e/5", "f/7"]),
    "separate trainings": ({"a": (None, [900]), "b": (None, [10])}, ["a/900", "b/10"]),
}


@pytest.mark.parametrize("clock", [1, -1], ids=["clock goes on", "clock set back"])
@pytest.mark.parametrize(("family", "heads"), FAMILIES.values(), ids=FAMILIES)
def test_steps_and_descent_choose_among_lineages_never_the_clock(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: dict[str, tuple[str | None, list[int]]],
    heads: list[str],
    clock: int,
) -> None:
    def path_of(checkpoint: str) -> Path:
        name, step = checkpoint.split("/")
        return tmp_path / name / f"step_{int(step):08d}"

    now = time.time()
    for place, (name, (origin, steps)) in enumerate(family.items()):
        saved_at = now + clock * 36000 * place
        monkeypatch.setattr(time, "time", lambda saved_at=saved_at: saved_at)
        lineage = Lineage(tmp_path, name, origin=path_of(origin) if origin else None)
        for step in steps:
            lineage.save(step)
    if len(heads) == 1:
        found = newest(tmp_path)
        assert found.checkpoint is not None and found.checkpoint.path == path_of(heads[0])
        assert found.lineage == path_of(heads[0]).parent and not found.notes
    else:
        with pytest.raises(CheckpointError, match="cannot tell which training to continue") as caught:
            newest(tmp_path)
        assert caught.value.code == "MC610"
        commands = [line.split()[:2] for line in caught.value.remedy.splitlines()[1:]]
        assert commands == [["--resume", str(path_of(head))] for head in heads]
    for name, (_, steps) in family.items():
        own = newest(tmp_path, lineage=tmp_path / name)
        assert own.checkpoint is not None and own.checkpoint.step == steps[-1]


def test_a_damaged_branch_gives_way_to_the_lineage_it_began_from(lineage: Lineage) -> None:
    directory = lineage.folder.parent
    older, newer = lineage.save(1).path, lineage.save(3).path
    damage(Lineage(directory, "branch", origin=older).save(5).path)
    found = newest(directory)
    assert found.checkpoint is not None and found.checkpoint.path == newer.resolve()
    assert len(found.notes) == 1 and "passed over step_00000005: [MC601]" in found.notes[0]


def test_the_highest_step_of_a_lineage_wins_though_the_clock_was_set_back(
    lineage: Lineage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage.save(5)
    an_hour_ago = time.time() - 3600
    monkeypatch.setattr(time, "time", lambda: an_hour_ago)
    lineage.save(9)
    for options in ({}, {"lineage": lineage.folder}):
        found = newest(lineage.folder.parent, **options)
        assert found.checkpoint is not None and found.checkpoint.step == 9


def test_of_several_trainings_that_fit_the_user_chooses(tmp_path: Path) -> None:
    paths = [Lineage(tmp_path, name).save(5, experiment=name).path for name in ("a", "b")]
    with pytest.raises(CheckpointError, match="cannot tell which training to continue") as caught:
        newest(tmp_path)
    assert caught.value.code == "MC610"
    assert all(f"--resume {path}" in caught.value.remedy for path in paths)
    own = search.newest(tmp_path, Peers(), fits, experiment="a")
    assert own.checkpoint is not None and own.checkpoint.path == paths[0]


def test_another_model_is_passed_over_but_never_by_starting_over(tmp_path: Path) -> None:
    mine, other = Lineage(tmp_path, "mine"), Lineage(tmp_path, "other")
    mine.save(5, model="mine")
    other.save(6, model="other")

    def only(wanted: str) -> search.Misfit:
        def misfit(manifest: Manifest) -> CheckpointError | None:
            return None if manifest.extra["model"] == wanted else CheckpointError("another model", code="MC607")

        return misfit

    found = newest(tmp_path, only("mine"))
    assert found.checkpoint is not None and found.checkpoint.step == 5
    assert len(found.notes) == 1 and "MC607" in found.notes[0]
    with pytest.raises(CheckpointError, match="another model"):
        newest(tmp_path, only("nobody's"))


def test_a_named_checkpoint_is_taken_or_refused(lineage: Lineage) -> None:
    directory = lineage.folder.parent
    older, newer = lineage.save(1).path, lineage.save(2).path
    found = search.named(newer, directory, Peers(), fits)
    assert found.checkpoint is not None and (found.checkpoint.step, found.lineage) == (2, lineage.folder.resolve())
    # Going on from an older one must not write over what came after it.
    branch = search.named(older, directory, Peers(), fits)
    assert branch.checkpoint is not None and (branch.checkpoint.step, branch.lineage) == (1, None)
    for pointer in (directory / "latest", lineage.folder, directory):
        below = search.named(pointer, directory, Peers(), fits)
        assert below.checkpoint is not None and below.checkpoint.step == 2
    damage(newer)
    with pytest.raises(CheckpointError) as caught:
        search.named(newer, directory, Peers(), fits)
    assert caught.value.code == "MC601"


def test_a_branch_that_has_saved_nothing_goes_on_from_where_it_began(lineage: Lineage) -> None:
    directory = lineage.folder.parent
    older = lineage.save(1).path
    lineage.save(2)
    branch = Lineage(directory, "branch", origin=older)
    found = newest(directory, lineage=branch.folder)
    assert found.checkpoint is not None and found.checkpoint.path == older.resolve()
    assert found.lineage == branch.folder, "what came after the older one stays as it is"
    branch.save(5)
    found = newest(directory, lineage=branch.folder)
    assert found.checkpoint is not None and found.checkpoint.step == 5
    fresh = Lineage(directory, "fresh")
    assert newest(directory, lineage=fresh.folder).checkpoint is None


@pytest.mark.parametrize("name", ["run", os.fsdecode(b"run-\xff ")], ids=["plain", "no text"])
def test_a_branch_in_a_linked_directory_finds_what_it_began_from(tmp_path: Path, name: str) -> None:
    real = tmp_path / "disks/7/scratch/team/checkpoints"
    real.mkdir(parents=True)
    linked = tmp_path / "linked"
    linked.symlink_to(real)
    older = Lineage(linked, name).save(1).path.resolve()
    branch = Lineage(linked, "branch", origin=older)
    for folder in (branch.folder, branch.folder.resolve()):
        found = newest(linked, lineage=folder)
        assert found.checkpoint is not None and found.checkpoint.path == older
    moved = real.rename(tmp_path / "moved")
    found = newest(moved, lineage=moved / "branch")
    assert found.checkpoint is not None and found.checkpoint.path == moved / name / older.name


def test_a_branch_whose_beginning_is_gone_does_not_start_over(lineage: Lineage) -> None:
    older = lineage.save(1).path
    branch = Lineage(lineage.folder.parent, "branch", origin=older)
    shutil.rmtree(older)
    with pytest.raises(CheckpointError, match=r"nor what it began from \(passed over step_00000001") as caught:
        newest(lineage.folder.parent, lineage=branch.folder)
    assert caught.value.code == "MC603" and str(older.resolve()) in str(caught.value.remedy)


def test_a_save_that_another_run_commits_meanwhile_does_not_stop_the_search(lineage: Lineage) -> None:
    lineage.save(1)
    staging, elsewhere = lineage.folder / ".staging-step_00000002@host.1", lineage.folder / ".elsewhere"
    staging.mkdir()
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            staging.rename(elsewhere)
            elsewhere.rename(staging)

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        steps = {found.checkpoint and found.checkpoint.step for found in (newest(lineage.folder) for _ in range(600))}
    finally:
        done.set()
        other.join()
    assert steps == {1}


def test_a_checkpoint_of_another_directory_starts_a_lineage_here(lineage: Lineage, tmp_path: Path) -> None:
    path = lineage.save(1).path
    found = search.named(path, tmp_path / "mine", Peers(), fits)
    assert found.checkpoint is not None and found.lineage is None


def test_a_folder_that_was_named_never_means_starting_over(lineage: Lineage) -> None:
    damage(lineage.save(1).path)
    for folder in (lineage.folder, lineage.folder.parent):
        with pytest.raises(
            CheckpointError, match=r"no checkpoint in .* is whole \(passed over step_00000001: \[MC601\]"
        ) as e:
            search.named(folder, lineage.folder.parent, Peers(), fits)
        assert e.value.code == "MC603"


@pytest.mark.parametrize(("name", "code"), [("missing", None), ("empty", "MC603")])
def test_what_is_no_checkpoint_is_a_sentence(tmp_path: Path, name: str, code: str | None) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError) as caught:
        search.named(tmp_path / name, tmp_path, Peers(), fits)
    assert caught.value.code == code and str(tmp_path / name) in caught.value.message
