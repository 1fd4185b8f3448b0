"""Where standard output takes no more: a full disk is one sentence and exit code 1, a reader that left is neither."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from model_check.record import RunDir

FULL = Path("/dev/full")
SENTENCE = (
    "model-check: error: standard output cannot be written: No space left on device; "
    "free space where it goes, or send it elsewhere\n"
)
VERBS = [
    ["--help"],
    ["explain", "MC204"],
    ["plan", "--help"],
    ["plan", "--preset", "debug", "--gpu", "H100"],
    ["diagnose", "run"],
]


def model_check(
    words: list[str], folder: Path, *, stdout: int, stderr: int = subprocess.PIPE, unbuffered: bool = False
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    if unbuffered:
        environment["PYTHONUNBUFFERED"] = "1"
    command = [sys.executable, "-m", "model_check", *words]
    return subprocess.run(command, cwd=folder, env=environment, stdout=stdout, stderr=stderr, text=True, timeout=60)


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", [False, True], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_a_full_disk_is_one_sentence(tmp_path: Path, words: list[str], unbuffered: bool) -> None:
    RunDir.create(tmp_path / "run")
    with FULL.open("w") as full:
        done = model_check(words, tmp_path, stdout=full.fileno(), unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (1, SENTENCE)


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_report_that_rich_prints_to_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    with FULL.open("w") as full:
        done = model_check(["doctor", "--only", "basic"], tmp_path, stdout=full.fileno())
    assert (done.returncode, done.stderr) == (1, SENTENCE)


@pytest.mark.parametrize(
    "words", [["--help"], ["explain", "MC204"], ["doctor", "--only", "basic"]], ids=["print", "typer", "rich"]
)
def test_a_reader_that_left_hears_nothing_more(tmp_path: Path, words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = model_check(words, tmp_path, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_where_no_sentence_can_be_said_the_exit_code_still_speaks(tmp_path: Path) -> None:
    with FULL.open("w") as full:
        mistake = model_check(["trian"], tmp_path, stdout=subprocess.PIPE, stderr=full.fileno())
        nowhere = model_check(["explain", "MC204"], tmp_path, stdout=full.fileno(), stderr=full.fileno())
    assert (mistake.returncode, nowhere.returncode) == (2, 1)


def test_a_file_gets_all_of_it(tmp_path: Path) -> None:
    shown = tmp_path / "shown.txt"
    with shown.open("w") as file:
        done = model_check(["explain", "MC204"], tmp_path, stdout=file.fileno())
    piped = model_check(["explain", "MC204"], tmp_path, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr, piped.returncode) == (0, "", 0)
    assert shown.read_text() == piped.stdout and piped.stdout.startswith("MC204: ")
