"""Events about memory, and about our own recording."""

from __future__ import annotations

from dataclasses import dataclass

from model_check.record.events.base import Event


@dataclass(frozen=True, kw_only=True)
class RecordingFailed(Event, kind="recording_failed"):
    """Something of ours failed; the script went on without that record."""

    error: str = ""
    traceback: str = ""
    what: str | None = None  # the record that is missing, where only one is
