"""Whose line is named: the user's, or ours where our own command line is the program."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

import model_check
from model_check.blackbox.frames import UserCode

_PACKAGE = Path(model_check.__file__).resolve().parent
_DOOR = "/opt/venv/bin/model-check"
_CLI, _LOOP = str(_PACKAGE / "cli" / "rank.py"), str(_PACKAGE / "engine" / "loop.py")
_WATCHER = str(_PACKAGE / "blackbox" / "spans.py")
_USER = "/home/me/train.py"
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
        ((_USER, _KERNEL, "<eval_with_key>.3"), _USER),
    ],
)
def test_the_line_that_is_named(files: tuple[str, ...], named: str) -> None:
    code = UserCode()
    found = code.innermost(frame_through(files))
    assert found == (named, 2, "outer")
    described = [{"file": file, "line": 2, "function": "outer"} for file in files]
    user = code.user_frame(described)
    assert user is not None and user["file"] == named
