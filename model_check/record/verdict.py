"""The verdict: what happened to a run, and the findings that say why."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from model_check.record.files import read_json, write_json_atomic
from model_check.record.typed import from_json

SCHEMA = 1
_ROOM_BYTES = 1 << 16

Outcome = Literal["running", "completed", "failed", "interrupted"]
Certainty = Literal["proven", "observed", "suspected"]
Severity = Literal["error", "warning", "info"]


@dataclass
class Finding:
    """One named fault: who, where, why, and what to do.

    `title`, `evidence` and `fix` are sentences for people: no rule and no program needs to read them. What they say is
    also in the other fields: `cause` is one of those that the catalogue lists for the code, `facts` has the values.
    """

    code: str = ""
    title: str = ""
    certainty: Certainty = "observed"
    severity: Severity = "error"
    ranks: list[int] = field(default_factory=list)
    victims: list[int] = field(default_factory=list)
    step: int | None = None
    phase: str | None = None
    location: str | None = None
    function: str | None = None
    tensor: str | None = None
    evidence: list[str] = field(default_factory=list)
    fix: list[str] = field(default_factory=list)
    seconds_to_detect: float | None = None
    cause: str | None = None
    caused_by: str | None = None  # what went wrong before, if this only followed from it: a code or an event
    host: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class DetectionTimes:
    """The seconds it took to name each fault. Only the first naming of a fault counts."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...]], float] = {}

    def settle(self, finding: Finding, otherwise: float | None = None) -> None:
        """Sets a finding's time to that of its first naming. `otherwise` is used if the rule knew no time."""
        key = (finding.code, tuple(finding.ranks))
        seconds = finding.seconds_to_detect if finding.seconds_to_detect is not None else otherwise
        if key not in self._known and seconds is not None:
            self._known[key] = round(seconds, 3)
        finding.seconds_to_detect = self._known.get(key)


@dataclass
class Verdict:
    """The first finding is the root cause. `notes`: failures of our own code; left out if empty."""

    outcome: Outcome = "running"
    exit_code: int | None = None
    world_size: int = 0
    steps_completed: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        body = asdict(self)
        if not self.notes:
            del body["notes"]
        return {"schema": body.pop("schema"), **body}

    def write(self, path: Path) -> None:
        write_json_atomic(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> Verdict | None:
        """The verdict in the file, or None where there is none that can be read."""
        value = read_json(path)
        if not isinstance(value, dict) or value.get("outcome", "running") not in get_args(Outcome):
            return None
        verdict = from_json(cls, value)
        verdict.findings = [finding for finding in verdict.findings if finding.code]
        return verdict


class VerdictFile:
    """verdict.json of a live run, with reserved space: a full disk must not keep a run from reporting just that."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._room = path.with_name(".verdict.room")
        self._set_aside()

    def write(self, verdict: Verdict) -> None:
        try:
            verdict.write(self._path)
        except OSError:
            self.close()
            verdict.write(self._path)
            self._set_aside()

    def close(self) -> None:
        with suppress(OSError):
            self._room.unlink(missing_ok=True)

    def _set_aside(self) -> None:
        with suppress(OSError), self._room.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _ROOM_BYTES)
