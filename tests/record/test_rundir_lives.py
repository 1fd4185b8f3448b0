"""What an earlier life of a run left behind is kept, and is not taken for this one's."""

from __future__ import annotations

from pathlib import Path

from model_check.record import RunDir


def leave(run_dir: RunDir, ranks: range, word: str) -> None:
    """What ranks and a supervisor leave behind."""
    for folder in (run_dir.stacks_dir, run_dir.flight_dir):
        folder.mkdir(exist_ok=True)
    for rank in ranks:
        name = f"rank-{rank:05d}"
        run_dir.events(rank).write_text(word)
        run_dir.ring(rank).write_text(word)
        (run_dir.stacks_dir / f"{name}.r1.json").write_text(word)
        (run_dir.flight_dir / f"{name}.json").write_text(word)
    run_dir.verdict.write_text(word)
    run_dir.metrics.write_text(word)


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_each_rank_moves_its_own_and_rank_0_what_belongs_to_nobody(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    leave(run_dir, range(3), "first")
    assert run_dir.set_aside_earlier_life(1, world_size=2) == run_dir.root / "attempts" / "1"
    assert run_dir.ring(0).exists() and run_dir.verdict.exists(), "another rank's files are its own affair"
    run_dir.events(1).write_text("second")  # rank 1 is already at work when rank 0 comes
    run_dir.set_aside_earlier_life(0, world_size=2)
    assert files(run_dir.root / "attempts" / "1").keys() == {
        "verdict.json",
        *(f"events/rank-{rank:05d}.jsonl" for rank in range(3)),
        *(f"blackbox/rank-{rank:05d}.ring" for rank in range(3)),
        *(f"stacks/rank-{rank:05d}.r1.json" for rank in range(3)),
        *(f"flight/rank-{rank:05d}.json" for rank in range(3)),
    }
    del_attempts = {name: text for name, text in files(run_dir.root).items() if not name.startswith("attempts")}
    assert del_attempts == {"events/rank-00001.jsonl": "second", "metrics.jsonl": "first"}


def test_lives_are_counted_and_none_is_written_over(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    assert run_dir.set_aside_earlier_life(0, world_size=2) is None
    for number, word in enumerate(("first", "second", "third"), start=1):
        leave(run_dir, range(2), word)
        for rank in (1, 0):
            assert run_dir.set_aside_earlier_life(rank, world_size=2) == run_dir.root / "attempts" / str(number)
    kept = [files(run_dir.root / "attempts" / str(number)) for number in (1, 2, 3)]
    assert [set(texts.values()) for texts in kept] == [{"first"}, {"second"}, {"third"}]
