"""Finds the user's own line: the innermost frame that is not torch, the standard library, a package, or ourselves.

Where our own command line was entered, our trainer is the program and whatever called it is only a door (a console
script, pretrain_main.py): then the innermost line of ours that does the work is named.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

from model_check.record.redaction import redact_text
from model_check.record.stacks import Frame, innermost_user
from model_check.record.user_code import is_door, is_trainer, is_user_file

_MAX_FRAMES = 60


class UserCode:
    """Which files are the user's, and how their paths were given to the interpreter.

    The interpreter makes the path of a script absolute; people know it as they typed it, so a file in the script's
    folder is shown relative to what was typed.
    """

    def __init__(self) -> None:
        self.script = given_script()
        self.cwd = str(Path.cwd())
        self._script_folder = str(Path(self.cwd, self.script).parent) + os.sep if self.script else ""
        self._given_folder = Path(self.script).parent
        roots = {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
        self._libraries = tuple(str(Path(root)) + os.sep for root in roots)
        self._shown: dict[str, str | None] = {}
        self._ours: set[str] = set()  # files of ours that do a job's work, of those seen so far

    def shown(self, file: str) -> str | None:
        """The path to show for a file of the user's; None for everything else."""
        try:
            return self._shown[file]
        except KeyError:
            shown = self._shown[file] = self._classify(file)
            return shown

    def path_of(self, shown: str) -> str | None:
        """The file that is shown so, if it is the user's and has been met."""
        return next((path for path, known in self._shown.items() if known == shown), None)

    def _classify(self, file: str) -> str | None:
        if not is_user_file(file) or file.startswith(self._libraries):
            if is_trainer(file):
                self._ours.add(file)
            return None
        torch = getattr(sys.modules.get("torch"), "__file__", None)
        if torch and file.startswith(str(Path(torch).parent) + os.sep):
            return None
        if self._script_folder and file.startswith(self._script_folder) and not self._given_folder.is_absolute():
            return str(self._given_folder / file[len(self._script_folder) :])
        return file

    def innermost(self, frame: FrameType | None) -> tuple[str, int, str] | None:
        """(path, line, function) of the innermost user frame from `frame` outwards."""
        known, our_files = self._shown, self._ours
        ours: tuple[str, int, str] | None = None
        while frame is not None:
            code = frame.f_code
            file = code.co_filename
            shown = known[file] if file in known else self.shown(file)
            if shown is not None:
                return shown, frame.f_lineno, code.co_name
            if file in our_files:
                ours = ours or (file, frame.f_lineno, code.co_name)
                if is_door(file):
                    break
            frame = frame.f_back
        return ours

    def caller(self, frame: FrameType | None) -> Frame | None:
        """The innermost user frame from `frame` outwards, as events carry it."""
        found = self.innermost(frame)
        if found is None:
            return None
        shown, line, function = found
        return self.described(self.path_of(shown) or shown, line, function)

    def described_traceback(self, trace: TracebackType | None) -> tuple[Frame, ...]:
        """The frames of an exception, outermost first; the innermost ones where it is very deep."""
        frames = []
        while trace is not None:
            code = trace.tb_frame.f_code
            frames.append((code.co_filename, trace.tb_lineno, code.co_name))
            trace = trace.tb_next
        return tuple(self.described(*frame) for frame in frames[-_MAX_FRAMES:])

    def described(self, file: str, line: int, function: str) -> Frame:
        """One frame, its path as it is shown and its source line."""
        import linecache  # only when something went wrong

        text = redact_text(linecache.getline(file, line).strip())
        return Frame(self.shown(file) or file, line, function, text[:300])

    def user_frame(self, frames: Sequence[Frame]) -> Frame | None:
        """The innermost user frame among described ones."""
        return innermost_user(reversed(frames), lambda frame: self.shown(frame.file) is not None)


def given_script() -> str:
    """The script as it was typed, empty for `-c`, `-m` and an interactive interpreter."""
    words = list(sys.orig_argv[1:])
    while words:
        word = words.pop(0)
        if word in ("-X", "-W") and words:
            words.pop(0)
        elif word in ("-c", "-m", "-"):
            return ""
        elif not word.startswith("-"):
            return word
        elif not word.startswith("--") and word[-1] in "cm":
            return ""
    return ""
