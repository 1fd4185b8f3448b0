"""The launcher's own account of a job: one line in events/supervisor.jsonl for everything it does or sees."""

from __future__ import annotations

import time
from typing import Any

from model_check.record import JsonlWriter, RunDir
from model_check.record.events import Event


def _about(event: Event) -> dict[str, Any]:
    return {"pid": event.pid} if event.pid else {}


class Journal:
    """Appends events with both clocks: `t` (monotonic) to compare with the ranks' records, `time` to read."""

    def __init__(self, run_dir: RunDir) -> None:
        self._writer = JsonlWriter(run_dir.supervisor_events)
        self.lost: OSError | None = None  # why a record could not be written

    def write(self, event: Event | str, *, at_monotonic: float | None = None, **details: Any) -> None:
        """`at_monotonic`, or the event's own `t`: when it happened, if not now."""
        now = time.monotonic()
        if isinstance(event, Event):
            details = {**_about(event), **event.body()}
            at_monotonic = event.t or at_monotonic
        name = event if isinstance(event, str) else event.kind
        at = now if at_monotonic is None else at_monotonic
        # A full disk under the run directory must not end the job that is being watched: the record is lost instead.
        try:
            self._writer.write({"event": name, "t": at, "time": time.time() - (now - at), **details})
        except OSError as error:
            self.lost = error

    def close(self) -> None:
        self._writer.close()
