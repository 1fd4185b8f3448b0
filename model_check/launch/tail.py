"""Follows a growing log file and gives back whole, clean lines."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from model_check.launch.loglines import clean

LONGEST_LINE = 1 << 16
_READ_BYTES = 1 << 18


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
