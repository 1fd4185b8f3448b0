"""Decides which tracebacks reach the terminal: each distinct one once, and one line for each victim.

A rank that dies takes its peers with it, and each peer prints a long traceback that says only that. The log files keep
every line.
"""

from __future__ import annotations

import re
from pathlib import Path

from model_check.record.error_texts import is_lost_peer

_HEAD = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[rank\d+\]: ")  # torch's prefix on every line of an exception that ends a rank
_LONGEST = 2000  # lines; a longer block has lost its end
_SHOWN_CHARACTERS = 160
_MOST_KEPT = 1000  # a script may print caught exceptions without an end


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
            body, block = _RANK.sub("", line), self._open.get(label)
            if block is None:
                if body == _HEAD:
                    self._open[label] = [line]
                else:
                    found.append(line)
                continue
            block.append(line)
            if body.startswith(" ") and len(block) < _LONGEST:
                continue
            found += self._judged(label, self._open.pop(label), body, log)
        return found

    def _judged(self, label: str, block: list[str], last: str, log: Path) -> list[str]:
        said = last[:_SHOWN_CHARACTERS] + (" …" if len(last) > _SHOWN_CHARACTERS else "")
        if is_lost_peer(last):
            self._first_victim = self._first_victim or [f"[{label}] {line}" for line in block]
            return [f"lost its peer: {said} (traceback: {log})"]
        text = "\n".join(_RANK.sub("", line) for line in block)
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
