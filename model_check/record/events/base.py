"""One line of `events/*.jsonl`: its kind, when and by which process it was written, and the fields of that kind.

Each kind is a dataclass below `model_check/record/events/`; its writer passes an instance to `BOX.event` (in a rank) or
`Journal.write` (in the launcher), its reader asks `RankEvidence.happened(Kind)` or `Evidence.said(Kind)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from model_check.record.files import read_jsonl
from model_check.record.typed import from_json, to_json

_STAMPS = ("t", "time", "pid")
KINDS: dict[str, type[Event]] = {}


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every event has."""

    kind: ClassVar[str] = ""

    t: float = 0.0  # CLOCK_MONOTONIC seconds, to compare with the ranks' rings
    time: float | None = None  # wall-clock seconds, to read; only in the launcher's events
    pid: int = 0  # the process that it is about

    def __init_subclass__(cls, kind: str = "", **more: Any) -> None:
        super().__init_subclass__(**more)
        if kind:
            assert kind not in KINDS, f"two events of kind {kind!r}: {KINDS[kind]} and {cls}"
            cls.kind = kind
            KINDS[kind] = cls

    def body(self) -> dict[str, Any]:
        """The fields of this kind, without the stamps that the writer adds."""
        return {name: value for name, value in to_json(self).items() if name not in _STAMPS}


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """A kind that this version does not know; a newer one may have written it."""

    name: str = ""


def read_event(record: Mapping[str, Any]) -> Event:
    """The event in one line of the file."""
    name = str(record.get("event", ""))
    known = KINDS.get(name)
    return from_json(known, record) if known is not None else from_json(UnknownEvent, {**record, "name": name})


def read_events(path: Path) -> list[Event]:
    """All events of a file, oldest first; none where there is no file."""
    return [read_event(record) for record in read_jsonl(path).records]
