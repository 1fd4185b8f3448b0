"""A disk that fills up during a run costs the run our files and nothing else. The verdict says so."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.conftest import BIN, TINY, Outcome, Shell


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk just for the test."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (folder / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def run_and_fill(shell: Shell, command: list[str], ready: Path, disk: Path) -> Outcome:
    """Fills the disk once `ready` has something in it; the command runs to its end."""
    files: tuple[IO[str], IO[str]] = ((shell.folder / "out").open("w+"), (shell.folder / "err").open("w+"))
    with files[0] as out, files[1] as err:
        process = subprocess.Popen(command, cwd=shell.folder, env=shell.environment(), stdout=out, stderr=err)
        try:
            end = time.monotonic() + 90
            while not (ready.exists() and ready.stat().st_size):
                assert time.monotonic() < end and process.poll() is None, (shell.folder / "err").read_text()
                time.sleep(0.01)
            fill(disk)
            (shell.folder / "full").touch()
            code = process.wait(timeout=120)
        finally:
            process.kill()
            process.wait()
    return Outcome(code, (shell.folder / "out").read_text(), (shell.folder / "err").read_text(), disk / "run")


@pytest.mark.slow
@pytest.mark.parametrize("tensorboard", ["false", "true"])
def test_training_goes_on_and_the_verdict_says_what_is_missing(shell: Shell, disk: Path, tensorboard: str) -> None:
    sets = (*TINY, "system.device=cpu", "checkpoint.interval=0", f"logging.tensorboard={tensorboard}")
    command = [str(BIN / "model-check"), "train", "--preset", "debug", "--nproc", "2", "--max-steps", "400"]
    command += ["--run-dir", str(disk / "run"), *(word for value in sets for word in ("--set", value))]
    done = run_and_fill(shell, command, disk / "run" / "metrics.jsonl", disk)
    assert done.code == 0, done.out + done.err
    assert "Step [399/400]" in done.out
    assert done.out.count("metrics.jsonl cannot be written (") == 1
    verdict = done.verdict()
    assert (verdict["outcome"], verdict["findings"]) == ("completed", [])
    assert "rank 0 could not write metrics.jsonl of the run directory: No space left on device" in verdict["notes"]
