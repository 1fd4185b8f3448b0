"""Whose line is named: the user's, or ours where our own command line is the program."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import FrameType

import pytest

import model_check
from model_check.blackbox.exceptions import hide_our_frames
from model_check.blackbox.frames import UserCode
from model_check.record.stacks import Frame

_PACKAGE = Path(model_check.__file__).resolve().parent
_DOOR = "/opt/venv/bin/model-check"
_CLI, _LOOP = str(_PACKAGE / "cli" / "train.py"), str(_PACKAGE / "engine" / "loop.py")
_RANK = str(_PACKAGE / "engine" / "rank.py")
_WATCHER = str(_PACKAGE / "blackbox" / "spans.py")
_USER = "/home/me/train.py"
_TORCH = "/home/me/model_check/.venv/lib/python3.12/site-packages/torch/nn/modules/linear.py"  # in a checkout of ours
_KERNEL = "/scratch/cache/qz/cqzhzbz5rhhjxz2f3x4m5n6o7p2q3r4s5t6u7v2w3x4y5z6a7b2c.py"  # as Inductor names its files


def frame_through(files: tuple[str, ...]) -> FrameType:
    """The innermost frame of a real stack whose code claims to come from these files, the outermost first."""

    def innermost() -> FrameType:
        return sys._getframe(1)

    call = innermost
    for file in reversed(files):
        names: dict[str, object] = {"inner": call}
        exec(compile("def outer():\n    return inner()\n", file, "exec"), names)
        call = names["outer"]  # type: ignore[assignment]
    return call()


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ((_USER, _WATCHER), _USER),
        ((_USER, _LOOP, _WATCHER), _USER),
        ((_DOOR, _CLI, _LOOP, _WATCHER), _LOOP),
        (("/home/me/pretrain_main.py", _CLI, _LOOP), _LOOP),
        ((_DOOR, _CLI, _USER, _WATCHER), _USER),
        ((_USER, _RANK, _LOOP, _WATCHER), _LOOP),
        ((_DOOR, _RANK, _LOOP, _TORCH, _WATCHER), _LOOP),
        ((_USER, _KERNEL, "<eval_with_key>.3"), _USER),
    ],
)
def test_the_line_that_is_named(files: tuple[str, ...], named: str) -> None:
    code = UserCode()
    found = code.innermost(frame_through(files))
    assert found == (named, 2, "outer")
    user = code.user_frame([Frame(file, 2, "outer") for file in files])
    assert user is not None and user.file == named


def test_a_traceback_loses_our_frames_and_none_of_a_project_with_our_name() -> None:
    project = "/home/me/model_check/launch/train.py"
    names: dict[str, object] = {}
    exec(compile("def outer():\n    return 1 / 0\n", project, "exec"), names)
    exec(compile("def watched():\n    return outer()\n", _WATCHER, "exec"), names)
    with pytest.raises(ZeroDivisionError) as caught:
        names["watched"]()  # type: ignore[operator]
    hide_our_frames(caught.value)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files == [__file__, project]
