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
