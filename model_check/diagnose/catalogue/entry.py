"""One entry of the catalogue: the long form behind a code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """What `model-check explain CODE` prints and the page of codes shows."""

    title: str
    what: str
    why: str
    how_detected: str
    fix: tuple[str, ...]  # for any script: must not mention our trainer's settings
    example: str
    ours: tuple[str, ...] = ()  # what to do under `model-check train`, if that differs
    causes: Mapping[str, str] = field(default_factory=dict)  # each value of a finding's `cause`, and what it means
    facts: Mapping[str, str] = field(default_factory=dict)  # each key of a finding's `facts`, and what its value is


# What a finding says of memory that ran out, in bytes and as far as it is known.
MEMORY_FACTS: Mapping[str, str] = {
    "requested": "what was asked for",
    "free": "what the device had left",
    "total": "what the device has",
    "allocated": "what torch had in use on the device",
    "rss": "what the process held of the host's memory",
    "held": "what was in use for what: parameters, gradients, optimizer, activations and temporaries",
}

# What a finding of any code may say of how its rank ended.
COMMON_FACTS: Mapping[str, str] = {
    "exception": "the class of the exception",
    "message": "the first line of its text, or the words that the rank gave when it left",
    "statement": "the source line that raised it, where the exception has no text",
    "raised_in": "the process that raised it first, where the rank only raised it again",
    "followed_from": "the class of the exception from which it followed",
    "exit_code": "the exit code of the rank",
    "via": "how it left: return, sys.exit, os._exit, or SystemExit where no exit was called",
    "signal": "the name of the signal that ended it",
    "last_recorded": "true: the line is the last that was recorded before a kill, not its cause",
    "lost_peers": "what each rank raised that lost its peer because of this",
    "ended_by": "the script ended because of this: the ranks that did so, with the facts above",
    "lost_steps": "the first and the last step of a run that no longer trained: no loss was finite",
    "stranded": "the ranks that lost their peer by that end",
}
