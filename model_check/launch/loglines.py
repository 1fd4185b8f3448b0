"""The format of the job's log lines, and the cleaning that lets a foreign line onto the terminal."""

from __future__ import annotations

import re

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
