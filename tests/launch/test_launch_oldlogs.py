"""Old log folders: which ones a new job removes, and above all which ones it must not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_check.cli.main import main
from model_check.launch.log_files import _NAME, remove_old_logs
from model_check.record import RunDir

_NOW = 2_000_000_000.0
_DAY = 86400.0


@pytest.fixture
def gone() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def _folder(root: Path, name: str, days_old: float, *, log_days_old: float | None = None) -> Path:
    folder = root / name
    folder.mkdir()
    log = folder / "rank-00000.log"
    log.write_text("a line\n")
    written = _NOW - _DAY * (days_old if log_days_old is None else log_days_old)
    os.utime(log, (written, written))
    os.utime(folder, (_NOW - _DAY * days_old,) * 2)
    return folder


def _left(root: Path) -> set[str]:
    return {entry.name for entry in root.iterdir()}


def test_a_week_is_kept_and_no_more(tmp_path: Path, gone: int) -> None:
    old = _folder(tmp_path, f"model_check_logs_{gone}_20330401-000000", 7.1)
    numbered = _folder(tmp_path, f"model_check_logs_{gone}_20330401-000000-1", 30)
    young = _folder(tmp_path, f"model_check_logs_{gone}_20330501-000000", 6.9)
    assert sorted(remove_old_logs(tmp_path, _NOW)) == sorted([old, numbered])
    assert _left(tmp_path) == {young.name}


def test_beyond_a_size_and_a_number_an_hour_is_kept(tmp_path: Path, gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_check.launch.log_files.MOST_BYTES", 3 << 12)
    names = [f"model_check_logs_{gone}_20330501-{number:06d}" for number in range(6)]
    for number, name in enumerate(names):
        _folder(tmp_path, name, 0.03 + 0.01 * number)  # the newest two within the hour
    remove_old_logs(tmp_path, _NOW)
    assert _left(tmp_path) == set(names[:3])
    monkeypatch.setattr("model_check.launch.log_files.MOST_FOLDERS", 1)
    remove_old_logs(tmp_path, _NOW)
    assert _left(tmp_path) == set(names[:2])


def test_beyond_twenty_a_day_is_kept(tmp_path: Path, gone: int) -> None:
    names = [f"model_check_logs_{gone}_20330501-{number:06d}" for number in range(25)]
    for number, name in enumerate(names):
        _folder(tmp_path, name, 1.5 + number / 100)
    fresh = _folder(tmp_path, f"model_check_logs_{gone}_20330518-000000", 0.5)
    remove_old_logs(tmp_path, _NOW)
    assert _left(tmp_path) == {fresh.name, *names[:19]}


def test_what_is_younger_than_a_day_stays_however_many_there_are(tmp_path: Path, gone: int) -> None:
    for number in range(30):
        _folder(tmp_path, f"model_check_logs_{gone}_20330518-{number:06d}", 0.9)
    assert remove_old_logs(tmp_path, _NOW) == []


def test_a_job_that_lives_or_wrote_lately_keeps_its_logs(tmp_path: Path, gone: int) -> None:
    mine = _folder(tmp_path, f"model_check_logs_{os.getpid()}_20330101-000000", 100)
    long_run = _folder(tmp_path, f"model_check_logs_{gone}_20330101-000000", 100, log_days_old=0.1)
    assert remove_old_logs(tmp_path, _NOW) == []
    assert _left(tmp_path) == {mine.name, long_run.name}


@pytest.mark.parametrize(
    "name",
    [
        "model_check_logs_{pid}",
        "model_check_logs_{pid}_20330101",
        "model_check_logs_x_20330101-000000",
        "model_check_logs_0_20330101-000000",
        "model_check_logs_{pid}_20330101-000000.bak",
        "my_model_check_logs_{pid}_20330101-000000",
    ],
)
def test_another_name_is_never_touched(tmp_path: Path, gone: int, name: str) -> None:
    _folder(tmp_path, name.format(pid=gone), 100)
    assert remove_old_logs(tmp_path, _NOW) == []


def test_links_and_files_are_neither_followed_nor_removed(tmp_path: Path, gone: int) -> None:
    precious = _folder(tmp_path, "precious", 100)
    outside = tmp_path / "outside.txt"
    outside.write_text("keep me")
    root = tmp_path / "root"
    root.mkdir()
    (root / f"model_check_logs_{gone}_20330101-000000").symlink_to(precious)
    (root / f"model_check_logs_{gone}_20330101-000001").write_text("a file")
    os.utime(root / f"model_check_logs_{gone}_20330101-000001", (0, 0))
    trap = root / f"model_check_logs_{gone}_20330101-000002"
    trap.mkdir()
    (trap / "rank-00000.log").symlink_to(outside)
    os.utime(trap / "rank-00000.log", (0, 0), follow_symlinks=False)
    os.utime(trap, (0, 0))
    assert remove_old_logs(root, _NOW) == [trap]
    assert outside.read_text() == "keep me" and (precious / "rank-00000.log").exists()
    assert len(_left(root)) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_never_touched(tmp_path: Path, gone: int) -> None:
    theirs = _folder(tmp_path, f"model_check_logs_{gone}_20330101-000000", 100)
    os.chown(theirs, 65534, 65534)
    assert remove_old_logs(tmp_path, _NOW) == [] and theirs.exists()


def test_a_root_that_is_not_there_is_nothing_to_tidy(tmp_path: Path) -> None:
    assert remove_old_logs(tmp_path / "nowhere") == []


@given(st.text(max_size=60))
def test_only_the_exact_name_is_ours(text: str) -> None:
    matched = _NAME.fullmatch(text)
    assert matched is None or text.startswith(f"model_check_logs_{int(matched['pid'])}_")


def test_diagnose_says_that_the_logs_are_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.logs.symlink_to(tmp_path / "pruned")
    with pytest.raises(SystemExit) as done:
        main(["diagnose", str(run_dir.root)])
    assert done.value.code == 0
    assert f"the raw logs of its ranks are gone: {tmp_path / 'pruned'} was pruned" in capsys.readouterr().out
