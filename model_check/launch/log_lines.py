"""Lines of the ranks' logs on their way to the terminal: read whole, cleaned, labelled, and each traceback once.

A rank that dies takes its peers with it, and each peer prints a long traceback that says only that: of those, one line
for each victim is shown. The log files keep every line.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from model_check.record.error_texts import is_lost_peer

LONGEST_LINE = 1 << 16
_READ_BYTES = 1 << 18

# CSI and OSC sequences, two-character escapes, then every control character that is left but the tab;
# also the marks that make a terminal write from right to left.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
# Lines of our own that say their rank already, in a format that others read by machine.
_LABELLED = re.compile(r"\[(?:[\w.-]+:)?(?:GPU|CPU)\d+\] |\[Rank \d+\] LOCK: |\[[\d:.]+\]\[\+[\d.]+s\]\[R\d+/\d+\]")

_ETA_OF_A_STEP = re.compile(r"(?<=[\dnf]) \| ETA: [\dd: ?]+(?=$| \| Skipped: )")

_TRACEBACK_HEAD = "Traceback (most recent call last):"
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ")  # torch's prefix on every line of an exception that ends a rank
_LONGEST_TRACEBACK = 2000  # lines; a longer block has lost its end
_SHOWN_CHARACTERS = 160
_MOST_KEPT = 1000  # a script may print caught exceptions without an end


def clean(text: str) -> str:
    """One line without anything that could move the cursor, colour the screen or hide text."""
    # A progress bar redraws its line after each carriage return: only the last drawing counts.
    drawings = [part for part in text.split("\r") if part.strip()]
    return _CONTROL.sub("", drawings[-1] if drawings else "").rstrip()


def fitted(line: str, width: int) -> str:
    """A step's line without its ETA where a terminal would break it: the bar below says the same."""
    return _ETA_OF_A_STEP.sub("", line) if len(line) > width else line


def labelled(label: str, line: str) -> str:
    """The line with its rank in front, once."""
    return line if _LABELLED.match(line) else f"[{label}] {line}"


class LineTail:
    """Reads what was appended since the last look. The rest of an endless line is counted, not kept."""

    def __init__(self, path: Path, copy_to: Path | None = None) -> None:
        self._path = path
        self._fd: int | None = None
        self._partial = bytearray()
        self._dropped = 0
        self._copy: BinaryIO | None = None
        if copy_to is not None:
            with suppress(OSError):  # a failed copy must not harm the job
                copy_to.parent.mkdir(parents=True, exist_ok=True)
                self._copy = copy_to.open("ab", buffering=0)

    def read(self) -> list[str]:
        """The lines completed since the last call, out of at most 256 kB of new output."""
        return self._split(self._read_bytes())

    def close(self) -> list[str]:
        """Everything that is left, with the last line even where it has no end."""
        lines: list[str] = []
        while data := self._read_bytes():
            lines += self._split(data)
        if self._partial or self._dropped:
            lines.append(self._take())
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._copy is not None:
            self._copy.close()
            self._copy = None
        return lines

    def _read_bytes(self) -> bytes:
        if self._fd is None:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b""
        data = os.read(self._fd, _READ_BYTES)
        if data and self._copy is not None:
            with suppress(OSError):  # its disk is full: the lines are still shown, and still in the log
                self._copy.write(data)
        return data

    def _split(self, data: bytes) -> list[str]:
        lines: list[str] = []
        *ended, rest = data.split(b"\n")
        for piece in ended:
            self._keep(piece)
            lines.append(self._take())
        self._keep(rest)
        return lines

    def _keep(self, piece: bytes) -> None:
        room = LONGEST_LINE - len(self._partial)
        self._partial += piece[:room]
        self._dropped += len(piece[room:])

    def _take(self) -> str:
        line = clean(self._partial.decode("utf-8", "replace"))
        if self._dropped:
            line += f" … ({self._dropped} more bytes in {self._path.name})"
        self._partial.clear()
        self._dropped = 0
        return line


class Tracebacks:
    """Filters the lines of all ranks of a job."""

    def __init__(self) -> None:
        self._open: dict[str, list[str]] = {}
        self._whole: dict[int, str] = {}  # traceback text -> the rank that printed it first
        self._first_victim: list[str] = []

    def shown(self, label: str, lines: list[str], log: Path) -> list[str]:
        """Returns which of a rank's new lines to show. A traceback is held back until its last line."""
        found: list[str] = []
        for line in lines:
            body, block = _RANK_PREFIX.sub("", line), self._open.get(label)
            if block is None:
                if body == _TRACEBACK_HEAD:
                    self._open[label] = [line]
                else:
                    found.append(line)
                continue
            block.append(line)
            if body.startswith(" ") and len(block) < _LONGEST_TRACEBACK:
                continue
            found += self._judged(label, self._open.pop(label), body, log)
        return found

    def _judged(self, label: str, block: list[str], last: str, log: Path) -> list[str]:
        said = last[:_SHOWN_CHARACTERS] + (" …" if len(last) > _SHOWN_CHARACTERS else "")
        if is_lost_peer(last):
            self._first_victim = self._first_victim or [f"[{label}] {line}" for line in block]
            return [f"lost its peer: {said} (traceback: {log})"]
        text = "\n".join(_RANK_PREFIX.sub("", line) for line in block)
        seen = hash(text)
        if len(self._whole) >= _MOST_KEPT and seen not in self._whole:
            return block
        first = self._whole.setdefault(seen, label)
        return block if first == label else [f"{said} (the same traceback as {first}: {log})"]

    def left(self) -> list[str]:
        """At the end: unfinished blocks and, if no rank printed another traceback, the first victim's."""
        found = [f"[{label}] {line}" for label, block in self._open.items() for line in block]
        self._open.clear()
        return [*found, *([] if self._whole or found else self._first_victim)]
