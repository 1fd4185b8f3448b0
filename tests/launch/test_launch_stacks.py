"""Whose line a stack names: the user's, never a library's or the command that pip put beside the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from model_check.record import RunDir
from model_check.record.stacks import Frame, ProcessStacks, ThreadStack, read_stacks
from model_check.record.user_code import is_user_file
from model_check.supervise import stacks

_PACKAGE = str(Path(stacks.__file__).parents[1])


def _thread(*files: str) -> ThreadStack:
    frames = tuple(Frame(file, line, "f") for line, file in enumerate(files, 1))
    return ThreadStack("MainThread", 1, 1, False, False, frames)


@pytest.mark.parametrize(
    ("file", "user"),
    [
        ("/home/me/train.py", True),
        ("/tmp/torchinductor_me/qz/cqzhz.py", False),
        ("/scratch/qz/cqzhzbz5rhhjxz2f3x4m5n6o7p2q3r4s5t6u7v2w3x4y5z6a7b2c.py", False),
        ("<string>", False),
        ("/home/me/bin/train.py", True),
        ("/home/me/bin/train", True),
        ("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", False),
        ("/usr/lib/python3.12/threading.py", False),
        (f"{_PACKAGE}/engine/loop.py", False),
        ("/opt/another/copy/of/model_check/blackbox/step_phases.py", False),
        ("/home/me/model_check/train.py", True),
        ("<frozen importlib._bootstrap>", False),
        ("", False),
    ],
)
def test_whose_file_it_is(file: str, user: bool) -> None:
    assert is_user_file(file) is user


def test_a_command_beside_the_interpreter_is_no_users_file(tmp_path: Path) -> None:
    beside = tmp_path / "bin"
    beside.mkdir()
    (beside / "python3").symlink_to(sys.executable)
    command = beside / "some-trainer"
    command.write_text("import sys\nprint('up', flush=True)\nsys.stdin.read()\n")
    script = beside / "train.py"
    script.write_text(command.read_text())
    places = {}
    for file in (command, script):
        with subprocess.Popen([sys.executable, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            thread = stacks.take(process.pid).main
            assert thread is not None and thread.frames[-1].file == str(file), "the stack was not read"
            frame = thread.user_frame
            places[file.name] = frame.site if frame else None
            process.communicate()
    assert places == {"some-trainer": None, "train.py": f"{script}:3"}


def test_our_own_trainer_is_a_program_too() -> None:
    frame = _thread(
        "/v/site-packages/torch/optim/optimizer.py",
        f"{_PACKAGE}/blackbox/spans.py",
        f"{_PACKAGE}/engine/loop.py",
        f"{_PACKAGE}/engine/rank.py",
        f"{_PACKAGE}/launch/nursery.py",
        f"{Path(sys.executable).parent}/model-check",
    ).user_frame
    assert frame is not None and frame.site == f"{_PACKAGE}/engine/loop.py:3"


def test_a_script_that_only_calls_our_trainer_is_a_door() -> None:
    frame = _thread(f"{_PACKAGE}/engine/loop.py", f"{_PACKAGE}/engine/rank.py", "/home/me/pretrain_main.py").user_frame
    assert frame is not None and frame.site == f"{_PACKAGE}/engine/loop.py:1"


@pytest.mark.parametrize("process", ["rank", "loader_worker"])
def test_a_dump_is_read_as_it_was_written(tmp_path: Path, process: str) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    thread = _thread("/home/me/train.py", "/usr/lib/python3.12/threading.py")
    dump = ProcessStacks(17, 3.5, "py-spy", (thread,), "torn", rank=4, process=process)
    dump.write(run_dir, "2.look-1")
    name = "rank-00004.2.look-1.json" if process == "rank" else "rank-00004.2.look-1.17.json"
    assert read_stacks(run_dir.stacks_dir / name) == dump
