"""Errors that happened in another process and reach this one as text: of loader workers, pools and executors.

The traceback of such an exception shows where it was raised again. Where it was raised first stands in its text.
"""

from __future__ import annotations

import re

from model_check.record.events.crashes import Origin
from model_check.record.stacks import FRAME_LINE, Frame

_HEAD = "Traceback (most recent call last):"
_CAUGHT = re.compile(r"^'?\"?Caught (?P<type>[\w.]+) (in )?(?P<where>[^\n]{0,120}?)\.?(\n|\\n)Original Traceback ")
_WORD = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(: (?P<message>.*))?$")
_POOL_CAUSES = ("RemoteTraceback", "_RemoteTraceback")


def words(error: BaseException) -> str:
    """What the exception says. Its `__str__` is the script's own code, and may itself fail."""
    try:
        return str(error)
    except Exception as broken:
        return f"(its message cannot be shown: __str__ raised {type(broken).__name__})"


def original(error: BaseException) -> Origin | None:
    """The first raise; None: it was raised here."""
    text = words(error)
    caught = _CAUGHT.match(text)
    if caught is not None:
        # KeyError shows the repr of its text.
        plain = text if "\n" in text else text.encode().decode("unicode_escape", "replace")
        return _parse(plain, caught["where"], caught["type"])
    cause = error.__cause__
    if cause is not None and type(cause).__name__ in _POOL_CAUSES:
        return _parse(words(cause).strip().strip('"'), "a worker process of its pool", type(error).__name__)
    return None


def _parse(text: str, where: str, kind: str) -> Origin | None:
    """The last of the tracebacks in the text: exceptions that follow from each other are printed in their order."""
    _, found, body = text.rpartition(_HEAD)
    frames = tuple(Frame(m["file"], int(m["line"]), m["function"].strip()) for m in FRAME_LINE.finditer(body))
    if not found or not frames:
        return None
    said = [m for line in body.splitlines() if (m := _WORD.match(line))]
    message = said[-1]["message"] or "" if said else ""
    named = said[-1]["type"].rpartition(".")[2] if said else kind
    return Origin(type=named, message=message, frames=frames, where=where)
